"""Whole PPO iterations on every mix of tensor, context and data parallel ranks against reference.py, which splits nothing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.reference_types import IterationReport, ReferenceSample, ScoredSample
from tests.dist.ppo_utils.layout_ranks import (
    CASES,
    STEPS,
    Run,
    Split,
    iterations,
    make_models,
    make_samples,
    parameters_of,
    record_gradients,
)
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.ppo_utils.layout_ranks"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LAYOUTS = [(tp, cp, dp) for tp in (1, 2, 4) for cp in (1, 2, 4) for dp in (1, 2) if tp * cp * dp <= 8]
OUT = 2  # place of the output layer among the parameters of TinyModel: that of the policy is split by columns


@dataclass(frozen=True)
class Oracle:
    """The iteration by reference.py: columns over the trainable tokens of samples that count, `place` among all tokens."""

    samples: list[ReferenceSample]
    report: IterationReport
    place: Tensor
    columns: dict[str, Tensor]
    gradients: list[list[Tensor]]
    weights: list[Tensor]


@cache
def oracle(name: str) -> Oracle:
    models, samples, settings = make_models(name), make_samples(name), CASES[name]
    trained = [models.policy] if models.critic is None else [models.policy, models.critic]
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.5) for model in trained]
    gradients = [record_gradients(optimizer) for optimizer in optimizers]
    report = reference.ppo_iteration(
        models.policy,
        models.reference,
        models.critic,
        samples,
        settings,
        steps=STEPS,
        actor_optimizer=optimizers[0],
        critic_optimizer=optimizers[1] if len(optimizers) > 1 else None,
    )
    first = torch.tensor([0, *(len(s.response_ids) for s in samples)]).cumsum(0).tolist()
    scored = reference.whitened(report.scored) if settings.normalize_advantages else report.scored
    counted = [(start, one) for start, one in zip(first, scored, strict=False) if one.counts]
    per_step = [[g for part in step for g in part] for step in zip(*gradients, strict=True)]
    return Oracle(
        samples,
        report,
        torch.tensor([start + i for start, one in counted for i in one.sample.trainable]),
        _columns([one for _, one in counted]),
        per_step,
        [p.detach() for p in parameters_of(trained)],
    )


def _columns(scored: list[ScoredSample]) -> dict[str, Tensor]:
    names = ("old_log_probs", "ref_log_probs", "old_values", "weights", "rewards", "returns", "advantages")
    return {name: torch.tensor([x for one in scored for x in vars(one)[name]], dtype=torch.float64) for name in names}


@dataclass(frozen=True)
class Results:
    """The runs of all ranks of one layout, and the case and dtype they are of."""

    name: str
    dtype: torch.dtype
    tp_size: int
    runs: list[Run]

    @property
    def one_per_token(self) -> list[Run]:
        """Ranks that hold different tokens: the first of each tensor-parallel group."""
        return self.runs[:: self.tp_size]

    def whole(self, first: int, tensors: list[list[Tensor]]) -> list[Tensor]:
        """Parameters (or gradients) of the tensor-parallel group that starts at rank `first`, the output layer put together."""
        group = tensors[first : first + self.tp_size]
        return [torch.cat(parts, 1) if i == OUT else parts[0] for i, parts in enumerate(zip(*group, strict=True))]


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest L2 error of a tensor over max(its norm, 1e-3 of the norm of all) (SEMANTICS 9)."""
    whole = math.sqrt(sum(float(x.square().sum()) for x in expected))
    errors = [(f.double() - x).norm() / max(float(x.norm()), 1e-3 * whole) for f, x in zip(found, expected, strict=True)]
    return float(max(errors))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: "tp{}-cp{}-dp{}".format(*layout))
def ran(request: pytest.FixtureRequest, rank_pool: RankPool) -> Iterator[dict[tuple[str, torch.dtype], Results]]:
    # making the first optimizer of a process imports torch._dynamo, which takes each rank seconds
    rank_pool.preload(RANKS, "torch._dynamo")
    tp_size, cp_size, dp_size = request.param
    names, dtypes = list(CASES), list(TOLERANCE)
    arguments = {"layout": request.param, "names": names, "dtypes": dtypes, "splits": [Split(num_micro_batches=2)]}
    per_rank = rank_pool.run(f"{RANKS}:iterations", world=tp_size * cp_size * dp_size, **arguments)
    keys = [(name, dtype) for name in names for dtype in dtypes]
    yield {key: Results(*key, tp_size, list(runs)) for key, runs in zip(keys, zip(*per_rank, strict=True), strict=True)}


@pytest.fixture(params=[(name, dtype) for name in CASES for dtype in TOLERANCE], ids=lambda key: f"{key[0]}-{key[1]}")
def results(request: pytest.FixtureRequest, ran: dict[tuple[str, torch.dtype], Results]) -> Results:
    return ran[request.param]


def test_scores_rewards_and_advantages_of_every_layout_equal_the_reference(results: Results) -> None:
    expected = oracle(results.name)
    for first in range(results.tp_size):
        parts = [run.report.columns for run in results.runs[first :: results.tp_size]]
        tokens = torch.cat([part.tokens for part in parts])
        order = tokens.argsort()
        assert torch.equal(tokens[order], torch.arange(sum(len(s.response_ids) for s in expected.samples)))
        kept = torch.cat([part.kept for part in parts])[order]
        assert torch.equal(kept.nonzero()[:, 0], expected.place)
        for name, column in expected.columns.items():
            found = torch.cat([vars(part)[name] for part in parts])[order]
            assert found.dtype == results.dtype
            error = (found[kept].double() - column).abs().max() / max(1.0, float(column.abs().max()))
            assert error <= TOLERANCE[results.dtype], name
            if name in ("weights", "rewards", "advantages"):
                assert found[~kept].isfinite().all(), name
    for run in results.runs:
        assert run.report.rejected.tolist() == [one.rejected for one in expected.report.scored]
        assert run.report.kl == pytest.approx(expected.report.kl, rel=TOLERANCE[results.dtype])


def test_losses_and_metrics_of_every_layout_equal_the_reference(results: Results) -> None:
    expected, rel = oracle(results.name), TOLERANCE[results.dtype]
    for step, (plan, report) in enumerate(zip(STEPS, expected.report.steps, strict=True)):
        assert report.actor is not None
        figures = [run.report.steps[step] for run in results.one_per_token]
        num_tokens = sum(len(expected.samples[row].trainable) for row in plan.rows)
        assert sum(f.policy_loss for f in figures) == pytest.approx(report.actor.policy_loss, rel=rel, abs=rel)
        assert sum(f.actor_loss for f in figures) == pytest.approx(report.actor.loss, rel=rel, abs=rel)
        assert sum(f.entropy_sum for f in figures) / num_tokens == pytest.approx(report.actor.entropy, rel=rel)
        assert sum(f.ppo_kl_sum for f in figures) / num_tokens == pytest.approx(report.actor.ppo_kl, rel=rel, abs=rel)
        for run in results.runs:
            assert run.report.steps[step].actor_grad_norm == pytest.approx(report.actor.grad_norm, rel=rel)
            if report.critic is not None:
                assert run.report.steps[step].critic_grad_norm == pytest.approx(report.critic.grad_norm, rel=rel)
        if report.critic is not None:
            assert sum(f.value_loss for f in figures) == pytest.approx(report.critic.value_loss, rel=rel, abs=rel)


def test_gradients_and_weights_of_every_layout_equal_the_reference(results: Results) -> None:
    expected = oracle(results.name)
    for first in range(0, len(results.runs), results.tp_size):
        for step, gradients in enumerate(expected.gradients):
            found = results.whole(first, [run.gradients[step] for run in results.runs])
            assert relative_error(found, gradients) <= TOLERANCE[results.dtype], f"gradients of step {step}"
        weights = results.whole(first, [run.weights for run in results.runs])
        assert relative_error(weights, expected.weights) <= TOLERANCE[results.dtype]
        assert weights[OUT].dtype == results.dtype


def _cp_map(cp_size: int, samples: list[ReferenceSample]) -> CpMap:
    return CpMap(cp_size, *(np.array([len(vars(s)[name]) for s in samples]) for name in ("prompt_ids", "response_ids")))


@pytest.mark.parametrize("name", CASES)
def test_cases_reach_the_rulings_that_they_are_for(name: str) -> None:
    found = oracle(name)
    samples = found.samples
    assert [one.rejected for one in found.report.scored] == [row == 8 for row in range(9)]
    assert [bool(s.trainable) for s in samples] == [row != 3 for row in range(9)]
    assert samples[0].trajectory_id == samples[6].trajectory_id and samples[3].trajectory_id == samples[7].trajectory_id
    assert len(samples[1].token_ids) < 4 and sum(s.bootstraps for s in samples) == 3
    process_rewards = torch.tensor(samples[7].process_rewards)
    assert process_rewards[~samples[7].loss_mask].abs().min() > 0
    marks = [ids is None for s in samples for ids, trained in zip(s.support or (), s.loss_mask.tolist(), strict=True) if trained]
    assert 0 < sum(marks) < len(marks)
    lacks_label = [
        int(s.response_ids[i]) not in s.support[i].tolist() for s in samples for i in s.trainable if s.support[i] is not None
    ]
    assert any(lacks_label)
    # the second micro-batch of two of the second step, on one of two data-parallel ranks
    assert min(len(_cp_map(4, [samples[1], samples[3]]).response_index(rank)) for rank in range(4)) == 0
    (alone,) = iterations((1, 1, 1), [name], [torch.float64], [Split(num_micro_batches=1)])
    last = alone.report.steps[-1]
    active = (last.num_clipped_low > 0, last.num_clipped_high > 0, last.num_clipped_dual > 0)
    assert active == {"ppo": (True, True, True), "gspo": (True, True, False), "cispo": (False, True, False)}[name]
    assert all(step.actor is not None and step.actor.grad_norm > 0.1 for step in found.report.steps)
    assert (CASES[name].clip_grad < found.report.steps[0].actor.grad_norm) == (name == "cispo")


@budget(max_examples=12, deadline=None, derandomize=True)
@given(
    layout=st.sampled_from([(1, 1, 2), (1, 1, 4), (1, 2, 2), (1, 4, 2), (2, 2, 2), (1, 2, 4)]),
    owners=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    num_micro_batches=st.sampled_from([1, 2, 7]),
    name=st.sampled_from(list(CASES)),
)
@example(layout=(1, 1, 2), owners=[0] * 9, num_micro_batches=7, name="ppo")  # a rank without samples
@example(layout=(1, 4, 2), owners=[0, 1, 0, 0, 0, 0, 0, 0, 0], num_micro_batches=2, name="ppo")  # ranks without a token
@example(layout=(1, 4, 2), owners=[0, 1, 0, 0, 0, 0, 0, 0, 0], num_micro_batches=7, name="gspo")
@example(layout=(2, 2, 2), owners=[0, 0, 0, 1, 0, 0, 0, 0, 0], num_micro_batches=1, name="cispo")  # a rank with masked ones only
def test_gradients_of_uneven_shares_and_any_micro_batches_equal_those_of_the_whole_step(
    rank_pool: RankPool, layout: tuple[int, int, int], owners: list[int], num_micro_batches: int, name: str
) -> None:
    tp_size, _, dp_size = layout
    shares = [[row for row, owner in enumerate(owners) if owner % dp_size == rank] for rank in range(dp_size)]
    arguments = {"layout": layout, "names": [name], "dtypes": [torch.float64], "splits": [Split(num_micro_batches, shares)]}
    per_rank = rank_pool.run(f"{RANKS}:iterations", world=math.prod(layout), **arguments)
    results = Results(name, torch.float64, tp_size, [runs[0] for runs in per_rank])
    for first in range(0, len(results.runs), tp_size):
        for step, expected in enumerate(oracle(name).gradients):
            assert relative_error(results.whole(first, [run.gradients[step] for run in results.runs]), expected) <= 1e-10
