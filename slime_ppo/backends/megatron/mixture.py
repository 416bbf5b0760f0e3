"""Beside the layers of a mixture of experts: the load-balancing loss of a training step, and routing by given expert ids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_ppo.backends.megatron.collectives import sum_numbers, token_parallel_group
from slime_ppo.errors import DataError
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.types.micro_batch import MicroBatch


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router, whose load-balancing loss is weighted by the tokens of the micro-batch on this rank, and by nothing else.

    Megatron weighs it so for a division by the step's tokens, which we do not do, and from 0.19 on by the number of ranks too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calculate_per_token_loss = False

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        weighted = aux_loss * activation.shape[0]
        result: torch.Tensor = super().attach_and_log_load_balancing_loss(activation, aux_loss_coeff, weighted, *args, **kwargs)
        return result


class LoadBalance:
    """The auxiliary loss of a role's routers (Switch Transformer, Fedus et al. 2021, eq. 4 to 6), in every layer

        coeff * E * sum_i f_i P_i,   f_i = share of the choices that fell on expert i, P_i = its mean probability

    over all tokens of a micro-batch, prompts and padding too; 1 * coeff when balanced. A step adds the mean over its micro-batches,
    each weighted by its tokens. A mean over micro-batches depends on how they are cut: with coeff above 0 the gradient is the same
    for any tensor, context and pipeline parallelism, but not for any micro-batch size and data parallelism.
    """

    def __init__(self, config: TransformerConfig, layout: ParallelLayout, coeff: float) -> None:
        self._config, self._layout, self._coeff = config, layout, coeff
        self._share = 0.0  # of a token on one rank, in the mean over the step's tokens

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Scale the loss for these micro-batches. Collective over data- and context-parallel ranks."""
        own = float(sum(len(one.tokens) for one in micro_batches))
        (tokens,) = sum_numbers([own], micro_batches[0].tokens.device, token_parallel_group())
        # each rank of tensor x context parallel adds its part of a micro-batch's loss, weighted by its part of the tokens
        self._share = self._layout.tp_size * self._layout.cp_size / tokens
        self._config.moe_aux_loss_coeff = self._coeff * self._share
        clear_aux_losses_tracker()

    def mean(self) -> float:
        """Mean over layers and the step's tokens, without coeff; 1 when balanced. Collective over all ranks of the role."""
        of_layers = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
        # every rank has added its tokens' part of the loss of its own layers
        (total,) = sum_numbers([float(of_layers.sum())], of_layers.device, torch.distributed.group.WORLD)
        num_layers: int = self._config.num_layers
        return total * self._share / num_layers


@contextmanager
def replayed_routing(models: Sequence[GPTModel], expert_ids: torch.Tensor) -> Iterator[None]:
    """Inside, one forward pass of one micro-batch goes to the given experts, with the current router's weights for them.

    `expert_ids` [T, layers of the whole model, top_k]: of every token of the rank's pack, the same on all tensor-parallel ranks.
    The router's gradient flows as ever. Activation recompute runs the forward pass again outside, so it must be off.
    Raises DataError for ids of another shape, out of range, or doubled.
    """
    config = models[0].config
    _check_ids(expert_ids, config)
    # under sequence parallelism a rank routes its slice of the tokens
    own = expert_ids.chunk(parallel_state.get_tensor_model_parallel_world_size())[parallel_state.get_tensor_model_parallel_rank()]
    layers = [layer for model in models for layer in model.decoder.layers]
    for layer in layers:
        seat = layer.mlp.router.router_replay
        seat.set_target_indices(own[:, layer.layer_number - 1].long())
        seat.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        yield
    finally:
        for layer in layers:
            layer.mlp.router.router_replay.clear_router_replay_action()
            layer.mlp.router.router_replay.clear_indices()


def _check_ids(expert_ids: torch.Tensor, config: TransformerConfig) -> None:
    expected = (config.num_layers, config.moe_router_topk)
    if expert_ids.dim() != 3 or expert_ids.shape[1:] != expected:
        raise DataError(f"expert ids are {list(expert_ids.shape)}, expected [tokens, {expected[0]} layers, {expected[1]} experts]")
    ordered = expert_ids.sort(-1).values
    lowest, highest = (int(one) for one in ordered.aminmax()) if ordered.numel() else (0, 0)
    if lowest < 0 or highest >= config.num_moe_experts:
        raise DataError(f"expert ids reach from {lowest} to {highest}, expected 0 to {config.num_moe_experts - 1}")
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise DataError("expert ids name an expert twice for one token and layer, expected different ones")
