"""Supervised fine-tuning: loss and gradient are transformers' own, and the same in every layout and cut."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.types.rollout_batch import RolloutBatch
from tests.dist.backends.cases import Case, make_batch, make_plan
from tests.dist.backends.compare import STEP_TOLERANCES, gradient_error
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

FINE_TUNE = "tests.dist.backends.sft_ranks:fine_tune"
_NOT_TRAINED = -100  # of transformers' labels
LAYOUTS = {
    "dp2": (ParallelLayout(2), BatchSettings(1, None)),
    "tp2_fused": (ParallelLayout(2, tp_size=2), BatchSettings(100, None)),
    "pp2": (ParallelLayout(2, pp_size=2), BatchSettings(2, None)),
    "cp2": (ParallelLayout(2, cp_size=2), BatchSettings(None, 10)),
}


@pytest.fixture(scope="module")
def one_rank() -> dict:
    """The run on one rank, made once."""
    return {}


def _run(pool: RankPool, case: Case) -> list:
    return pool.run(FINE_TUNE, world=case.layout.num_ranks, case=case, batch=make_batch(), plan=make_plan())


def _one_rank(pool: RankPool, make_case: CaseMaker, reports: dict) -> tuple[Case, list]:
    if not reports:
        case = make_case(PpoConfig(), tie=False)
        reports["run"] = case, _run(pool, case)
    return reports["run"]


def _transformers(folder: str, batch: RolloutBatch) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of a batch by transformers: its loss of all samples at once, padded, over the labels that train."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    width = int(batch.total_lens.max())
    ids, labels = (torch.full((batch.num_samples, width), fill) for fill in (0, _NOT_TRAINED))
    for row in range(batch.num_samples):
        one = batch.select([row])
        tokens = torch.tensor(np.concatenate((one.prompt_ids, one.response_ids))).long()
        ids[row, : len(tokens)] = tokens
        labels[row, len(one.prompt_ids) : len(tokens)] = torch.where(
            torch.tensor(one.loss_mask), tokens[len(one.prompt_ids) :], _NOT_TRAINED
        )
    # padding lies behind every token that trains, so that a causal model needs no attention mask
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def test_step_loss_and_gradient_are_those_of_transformers(megatron_pool: RankPool, make_case: CaseMaker, one_rank: dict) -> None:
    case, [(nll, report)] = _one_rank(megatron_pool, make_case, one_rank)
    first = make_batch().select(make_plan().steps[0].rows)
    loss, gradient = _transformers(case.actor_folder, first)
    assert report.steps[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert report.steps[0]["nll"] == pytest.approx(loss, rel=1e-5)
    assert report.steps[0]["num_tokens"] == report.steps[0]["denominator_tokens"] == first.loss_mask.sum()
    assert gradient_error(report.gradients[0], gradient) <= 1e-5
    whole, _ = _transformers(case.actor_folder, make_batch())
    assert nll[0] == pytest.approx(whole, rel=1e-5)
    assert nll[1] < nll[0]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_fine_tuning_any_layout_and_cut_equals_one_rank(
    megatron_pool: RankPool, make_case: CaseMaker, one_rank: dict, tmp_path: Path, layout: str
) -> None:
    case, [(nll, expected)] = _one_rank(megatron_pool, make_case, one_rank)
    moved = replace(case.on(*LAYOUTS[layout], tmp_path), fuse_lm_head=layout.endswith("fused"))
    for own_nll, report in _run(megatron_pool, moved):
        assert own_nll == pytest.approx(nll, rel=1e-5)
        for step, tolerance in enumerate(STEP_TOLERANCES):
            assert report.steps[step] == pytest.approx(expected.steps[step], rel=tolerance), f"step {step}"
            assert gradient_error(report.gradients[step], expected.gradients[step]) <= tolerance, f"step {step}"
        for name, weights in expected.weights.items():
            assert np.abs(report.weights[name] - weights).max() <= 1e-2 * case.lr * len(expected.steps), name
        assert report.replicas_equal
