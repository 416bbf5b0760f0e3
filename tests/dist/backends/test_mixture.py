"""A mixture of experts in every layout of its experts: transformers' logits, one rank's gradients, and what only experts have."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.types.rollout_batch import RolloutBatch
from tests.dist.backends.cases import RANKS, Case, make_batch, make_plan, make_scored_batch
from tests.dist.backends.compare import assert_reports_equal, gradient_error
from tests.dist.backends.models import hf_rows
from tests.helpers.rank_pool import RankPool

if TYPE_CHECKING:
    from tests.dist.backends.ranks import Report

MIXTURE = "tests.dist.backends.mixture_ranks"
ALL = BatchSettings(100, None)
SINGLE = BatchSettings(1, None)
LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "ep2": ParallelLayout(2, ep_size=2),
    "ep2_dp2": ParallelLayout(4, ep_size=2),
    "tp2_etp2": ParallelLayout(2, tp_size=2, etp_size=2),
    "tp2_ep2": ParallelLayout(2, tp_size=2, ep_size=2),
    "tp2_ep2_etp2": ParallelLayout(4, tp_size=2, ep_size=2, etp_size=2),
    "pp2": ParallelLayout(2, pp_size=2),
    "pp2_ep2": ParallelLayout(4, pp_size=2, ep_size=2),
    "cp2_ep2": ParallelLayout(2, cp_size=2, ep_size=2),
}
BATCHINGS = {"ep2": BatchSettings(2, None), "tp2_etp2": ALL, "tp2_ep2": BatchSettings(None, 20)}
COEFF = 0.1


@pytest.fixture(scope="module")
def case(mixture_case: Case) -> Case:
    return mixture_case


@pytest.fixture(scope="module")
def one_rank(megatron_pool: RankPool, case: Case, tmp_path_factory: pytest.TempPathFactory) -> "Report":
    return _iteration(megatron_pool, case.on(ParallelLayout(1), BatchSettings(3, None), tmp_path_factory.mktemp("one")))


def _iteration(pool: RankPool, case: Case) -> "Report":
    world = case.layout.num_ranks
    return pool.run(f"{RANKS}:iteration", world=world, case=case, batch=make_batch(), plan=make_plan(), noise=0.2)[0]


@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "pp2_ep2"])
def test_experts_any_layout_equal_transformers_and_go_back_into_files(
    megatron_pool: RankPool, case: Case, tmp_path: Path, layout: str
) -> None:
    """Logits and values to 1e-5, exported tensors bit for bit, in small buckets that part the matrices of one expert."""
    moved, batch = case.on(LAYOUTS[layout], ALL, tmp_path), make_batch()
    reports = megatron_pool.run(
        f"{RANKS}:logits_values_and_export", world=moved.layout.num_ranks, case=moved, batch=batch, bucket_bytes=20_000
    )
    expected = hf_rows(case.actor_folder, batch, hidden=False).numpy()
    head = load_file(Path(case.critic_folder) / "model.safetensors")["score.weight"]
    values = hf_rows(case.critic_folder, batch, hidden=True).numpy() @ head[0]
    source = load_file(Path(case.actor_folder) / "model.safetensors")
    for own, own_values, exported in reports:
        assert np.abs(own - expected).max() <= 1e-5 and np.abs(own_values - values).max() <= 1e-5
        assert sorted(exported) == sorted(source)
        assert all(np.array_equal(exported[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize("layout", ["ep2_dp2", "tp2_ep2_etp2", "cp2_ep2"])
def test_iteration_any_layout_of_experts_equals_one_rank(
    megatron_pool: RankPool, case: Case, one_rank: "Report", tmp_path: Path, layout: str
) -> None:
    """Gradients of routers and experts too, their norm and its clipping, and the same experts on different ranks bit-equal."""
    moved = case.on(LAYOUTS[layout], BATCHINGS.get(layout, SINGLE), tmp_path)
    report = _iteration(megatron_pool, moved)
    assert_reports_equal(report, one_rank, case)
    names = report.actor.gradients[0]
    assert sum(".experts." in name for name in names) == 4 * 8 * 3 and sum("mlp.gate." in name for name in names) == 4
    assert all(step["grad_norm"] > 1 for step in one_rank.actor.steps[:1])  # above --clip-grad


def test_layout_of_experts_parts_them(megatron_pool: RankPool, case: Case, tmp_path: Path) -> None:
    moved = case.on(LAYOUTS["tp2_ep2_etp2"], ALL, tmp_path)
    places = [(4, 32, 0), (4, 32, 0), (4, 32, 1), (4, 32, 1)]
    assert megatron_pool.run(f"{MIXTURE}:expert_parameters", world=4, case=moved) == places


def test_offload_before_every_step_changes_no_bit_of_experts(megatron_pool: RankPool, case: Case, tmp_path: Path) -> None:
    moved = case.on(LAYOUTS["ep2"], SINGLE, tmp_path)
    without = _iteration(megatron_pool, moved)
    slept = _iteration(megatron_pool, replace(moved, offload_between=True).on(LAYOUTS["ep2"], SINGLE, tmp_path))
    for role in ("actor", "critic"):
        own, other = getattr(slept, role), getattr(without, role)
        assert own.steps == other.steps
        assert all(np.array_equal(own.weights[name], weights) for name, weights in other.weights.items())


def test_reference_swap_moves_the_experts_too(megatron_pool: RankPool, case: Case, tmp_path: Path) -> None:
    moved = case.on(LAYOUTS["ep2"], SINGLE, tmp_path)
    reference = replace(case, actor_folder=str(case.ref_folder)).on(LAYOUTS["ep2"], SINGLE, tmp_path)
    own = _scored(megatron_pool, moved)
    assert np.array_equal(own["ref_log_probs"], _scored(megatron_pool, reference)["old_log_probs"])
    assert np.abs(own["ref_log_probs"] - own["old_log_probs"]).max() > 1e-3


def _scored(pool: RankPool, case: Case) -> dict[str, np.ndarray]:
    return pool.run(f"{RANKS}:log_probs", world=case.layout.num_ranks, case=case, batch=make_batch())[0]


def test_router_of_a_bfloat16_model_computes_in_float32(megatron_pool: RankPool, case: Case, tmp_path: Path) -> None:
    moved = replace(case, dtype="bfloat16").on(LAYOUTS["one_rank"], ALL, tmp_path)
    (seen,) = megatron_pool.run(f"{MIXTURE}:router_dtypes", world=1, case=moved, batch=make_batch())
    assert seen == {"weight torch.bfloat16", "logits torch.float32"}


def _two_whole_samples() -> RolloutBatch:
    """Samples of 12 and 8 tokens: no padding in any layout, so that all layouts balance the same tokens."""
    batch = make_scored_batch().select([0, 5])
    lens = batch.prompt_lens + np.array([3, 1])
    return replace(batch, prompt_lens=lens, prompt_ids=np.arange(lens.sum(), dtype=np.int32) * 7 % 100)


def _hf_balance(folder: str, batch: RolloutBatch, *, apart: bool) -> tuple[float, dict[str, np.ndarray]]:
    """The load-balancing loss of each sample or of all, mean over tokens and layers, and the gradient of what it adds for COEFF."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = [layer.mlp.gate for layer in model.model.layers]
    probabilities: list[list[torch.Tensor]] = [[] for _ in routers]
    for kept, router in zip(probabilities, routers, strict=True):
        router.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.append((args[0].reshape(-1, 64) @ module.weight.T).softmax(-1))
        )
    for row in range(batch.num_samples):
        one = batch.select([row])
        model(torch.tensor(np.concatenate((one.prompt_ids, one.response_ids))).long()[None])
    losses: list[torch.Tensor] = []
    weights = []
    for kept in probabilities:
        for probability in kept if apart else [torch.cat(kept)]:
            chosen = torch.zeros_like(probability).scatter(1, probability.topk(2).indices, 0.5)
            losses.append(8 * (chosen.mean(0) * probability.mean(0)).sum())
            weights.append(len(probability) / 20)
    total = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)] + ["model.layers.0.self_attn.o_proj.weight"]
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(COEFF * total, [parameters[name] for name in names])
    return float(total.detach()) / 4, {name: found.numpy() for name, found in zip(names, gradients, strict=True)}


@pytest.mark.parametrize(
    ("layout", "batching"),
    [("one_rank", ALL), ("tp2_etp2", ALL), ("cp2_ep2", ALL), ("pp2_ep2", SINGLE)],
)
def test_aux_loss_adds_its_mean_over_the_tokens_of_the_steps_micro_batches(
    megatron_pool: RankPool, case: Case, tmp_path: Path, *, layout: str, batching: BatchSettings
) -> None:
    """Against the gradient of the formula in transformers' model; without it the routers' gradient is that of the policy alone."""
    batch, plan = _two_whole_samples(), replace(make_plan(), steps=(replace(make_plan().steps[0], rows=np.array([0, 1])),))
    found = []
    for coeff in (0.0, COEFF):
        moved = replace(case, ref_folder=None, moe_aux_loss_coeff=coeff).on(LAYOUTS[layout], batching, tmp_path)
        ranks = megatron_pool.run(f"{RANKS}:train_columns", world=moved.layout.num_ranks, case=moved, batch=batch, plan=plan)
        found.append(ranks[0])
    (without, _), (with_loss, critic) = found
    value, expected = _hf_balance(case.actor_folder, batch, apart=batching is SINGLE)
    added = {name: with_loss.gradients[0][name] - without.gradients[0][name] for name in expected}
    assert gradient_error(added, expected) <= 1e-4  # a small difference of two gradients
    assert "moe_aux_loss" not in without.steps[0]
    assert with_loss.steps[0]["moe_aux_loss"] == pytest.approx(value, rel=1e-5)
    assert critic.steps[0]["moe_aux_loss"] > 0
    assert with_loss.replicas_equal


@pytest.mark.parametrize("layout", ["one_rank", "tp2_ep2", "pp2"])
def test_replayed_routing_takes_the_given_experts_with_the_routers_own_weights(
    megatron_pool: RankPool, case: Case, tmp_path: Path, layout: str
) -> None:
    moved = case.on(LAYOUTS[layout], ALL, tmp_path)
    for found in megatron_pool.run(f"{MIXTURE}:replay", world=moved.layout.num_ranks, case=moved, batch=make_batch()):
        assert np.array_equal(found["same"], found["own"]) and np.array_equal(found["after"], found["own"])
        assert np.abs(found["other"] - found["own"]).max() > 0.1
        assert np.abs(found["reweighed"] - found["own"]).max() > 1e-3
        assert (found["router_gradients"] > 0).all()


def test_replayed_routing_refuses_ids_that_no_router_can_follow(megatron_pool: RankPool, case: Case, tmp_path: Path) -> None:
    ids = np.tile([0, 7], (3, 4, 1))
    choices = [ids[:, :3], ids + 1, ids - 1, np.zeros_like(ids)]
    (messages,) = megatron_pool.run(
        f"{MIXTURE}:refused_ids", world=1, case=case.on(LAYOUTS["one_rank"], ALL, tmp_path), choices=choices
    )
    assert messages == [
        "expert ids are [3, 3, 2], expected [tokens, 4 layers, 2 experts]",
        "expert ids reach from 1 to 8, expected 0 to 7",
        "expert ids reach from -1 to 6, expected 0 to 7",
        "expert ids name an expert twice for one token and layer, expected different ones",
    ]
