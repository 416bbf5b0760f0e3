"""What the tests of a mixture of experts run on each rank of the pool."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplayAction  # noqa: E402

from slime_ppo.backends.megatron.actor import ActorRole  # noqa: E402
from slime_ppo.backends.megatron.mixture import replayed_routing  # noqa: E402
from slime_ppo.errors import DataError  # noqa: E402
from slime_ppo.types.micro_batch import MicroBatch  # noqa: E402
from slime_ppo.types.rollout_batch import RolloutBatch  # noqa: E402
from slime_ppo.types.stats import Stats  # noqa: E402
from tests.dist.backends.cases import Case  # noqa: E402
from tests.dist.backends.ranks import _start_actor  # noqa: E402


def _layers(actor: ActorRole) -> list:
    return [layer for model in actor.models for layer in model.decoder.layers]


@contextmanager
def _recorded(actor: ActorRole) -> Iterator[list[torch.Tensor]]:
    """Expert ids [T, layers, top_k] of the pass inside; layers of other stages have the first ids."""
    found: list[torch.Tensor] = []
    for layer in _layers(actor):
        layer.mlp.router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    yield found
    by_layer = {}
    for layer in _layers(actor):
        own = layer.mlp.router.router_replay.get_recorded_indices()
        gathered = gather_from_sequence_parallel_region(own.float()) if actor.layout.sequence_parallel else own
        by_layer[layer.layer_number - 1] = gathered.long()
        layer.mlp.router.router_replay.clear_router_replay_action()
        layer.mlp.router.router_replay.clear_indices()
    first = torch.arange(2).expand_as(next(iter(by_layer.values())))
    found.append(torch.stack([by_layer.get(layer, first) for layer in range(actor.shape.num_layers)], 1))


def replay(case: Case, batch: RolloutBatch) -> dict[str, np.ndarray]:
    """Log-probs of the router's own choice, of the same choice replayed, of another one, of the same with other router weights,
    and after all that; and the gradient of the routers when their choice is given."""
    actor = _start_actor(case)
    micro_batches = actor.micro_batches(batch, np.arange(batch.num_samples))

    def columns() -> np.ndarray:
        return actor.columns(micro_batches, actor._old_head).columns["old_log_probs"]

    with _recorded(actor) as recorded:
        found = {"own": columns()}
    (ids,) = recorded
    other = (ids + 1) % actor.shape.num_experts
    with replayed_routing(actor.models, ids):
        found["same"] = columns()
    with replayed_routing(actor.models, other):
        found["other"] = columns()
    found["after"] = columns()
    with replayed_routing(actor.models, other):
        actor.accumulate(micro_batches, lambda one, out: _first_logits(one, out), Stats())
    with torch.no_grad():
        for layer in _layers(actor):
            layer.mlp.router.weight.mul_(0.5)
    with replayed_routing(actor.models, ids):
        found["reweighed"] = columns()
    norms = [float(layer.mlp.router.weight.main_grad.norm()) for layer in _layers(actor)]
    return found | {"router_gradients": np.array(norms)}


def _first_logits(micro_batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
    return output.index_select(0, micro_batch.positions)[:, 0].sum()


def refused_ids(case: Case, choices: list[np.ndarray]) -> list[str]:
    """What is said of expert ids that no router can follow."""
    actor, messages = _start_actor(case), []
    for ids in choices:
        try:
            with replayed_routing(actor.models, torch.tensor(ids)):
                messages.append("")
        except DataError as error:
            messages.append(str(error))
    return messages


def router_dtypes(case: Case, batch: RolloutBatch) -> set[str]:
    """dtypes of weight, logits and expert probabilities of the routers in a pass."""
    actor, seen = _start_actor(case), set()
    for layer in _layers(actor):
        router = layer.mlp.router
        gating = router.gating

        def noted(states: torch.Tensor, gating: object = gating) -> torch.Tensor:
            logits = gating(states)
            seen.add(f"logits {logits.dtype}")
            return logits

        router.gating = noted
        seen.add(f"weight {router.weight.dtype}")
    actor.columns(actor.micro_batches(batch, np.arange(batch.num_samples)), actor._old_head)
    return seen


def expert_parameters(case: Case) -> tuple[int, int, int]:
    """(experts of a layer on this rank, rows of their fc1 on this rank, expert-parallel rank)."""
    layer = _layers(_start_actor(case))[0]
    experts = layer.mlp.experts.local_experts
    return len(experts), experts[0].linear_fc1.weight.shape[0], parallel_state.get_expert_model_parallel_rank()
