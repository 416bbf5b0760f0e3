"""Inputs of the Megatron tests: a small rollout that is awkward on purpose, and the settings of its ranks. No Megatron here."""

import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import (
    BatchSettings,
    ExecutionSettings,
    ModelSettings,
    OptimizerSettings,
    RankSettings,
    WorkerSettings,
)
from slime_ppo.types.rollout_batch import FINISH_CODES, RolloutBatch
from slime_ppo.types.sample import FinishReason
from slime_ppo.types.step_plan import Step, StepPlan
from tests.helpers.tiny_llama import make_tiny_llama

RANKS = "tests.dist.backends.ranks"
VOCAB = 100
# seven samples: the last step holds one, so that a second data-parallel rank has an empty micro-batch there
PROMPT_LENS = (3, 1, 5, 2, 4, 2, 3)
RESPONSE_LENS = (6, 9, 1, 4, 7, 5, 8)
STEP_ROWS = ((2, 0, 5), (1, 3, 4), (6,))


@dataclass(frozen=True)
class Case:
    """One run: model folders, PPO settings, and how the samples are cut; `layout` and `batching` must not matter."""

    actor_folder: str
    critic_folder: str
    ref_folder: str | None
    ppo: PpoConfig
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    temperature: float = 1.0
    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(num_ranks=1))
    batching: BatchSettings = field(default_factory=lambda: BatchSettings(micro_batch_size=3, max_tokens=None))
    lr: float = 2e-4
    weight_decay: float = 0.1
    offload_between: bool = False
    fuse_lm_head: bool = False
    fp32_lm_head: bool = False
    dtype: str = "float32"
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    moe_aux_loss_coeff: float = 0.0
    critic_checkpoint: str | None = None
    init_value_head: Literal["zeros", "normal"] | None = "zeros"
    rendezvous: str = ""

    def settings(self, rank: int, role: str) -> WorkerSettings:
        """Of one rank of one role."""
        return WorkerSettings(
            rank=RankSettings(
                rank=rank,
                init_method=f"file://{self.rendezvous}",
                device="cpu",
                seed=1,
                num_threads=1,
                deterministic=True,
                collective_timeout_s=60.0,
            ),
            layout=self.layout,
            model=ModelSettings(
                hf_folder=self.actor_folder if role == "actor" else self.critic_folder,
                ref_folder=self.ref_folder if role == "actor" else None,
                dtype=self.dtype,
                make_vocab_size_divisible_by=32,
                fuse_lm_head=self.fuse_lm_head,
                fp32_lm_head=self.fp32_lm_head,
                moe_aux_loss_coeff=self.moe_aux_loss_coeff,
                checkpoint_folder=self.critic_checkpoint if role == "critic" else None,
                init_value_head=self.init_value_head,
                init_value_head_std=0.5,
            ),
            # Adam turns a gradient into its sign; the eps keeps rounding from deciding that for elements that are nearly 0
            optimizer=OptimizerSettings(
                clip_grad=1.0, weight_decay=self.weight_decay, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6
            ),
            batch=self.batching,
            execution=self.execution,
        )

    def on(self, layout: ParallelLayout, batching: BatchSettings, folder: Path) -> "Case":
        """The same run on other ranks; `folder` takes the file where they meet."""
        return replace(self, layout=layout, batching=batching, rendezvous=str(folder / uuid.uuid4().hex))


def make_folders(root: Path, *, tie: bool) -> tuple[str, str, str]:
    """(actor, critic, reference): three different models. The critic's folder brings a head of its own."""
    from safetensors.numpy import load_file, save_file

    actor = make_tiny_llama(root / "actor", layers=4, tie=tie, seed=1)
    critic = make_tiny_llama(root / "critic", layers=4, tie=tie, seed=2)
    reference = make_tiny_llama(root / "reference", layers=4, tie=tie, seed=3)
    weights = load_file(critic / "model.safetensors")
    weights["score.weight"] = 0.1 * np.random.default_rng(4).standard_normal((1, 64)).astype(np.float32)
    save_file(weights, critic / "model.safetensors", metadata={"format": "pt"})
    # close to the policy, as a reference is: KL terms of a far one drown everything else
    own, other = load_file(actor / "model.safetensors"), load_file(reference / "model.safetensors")
    mixed = {name: own[name] + 0.05 * (other[name] - own[name]) for name in own}
    save_file(mixed, reference / "model.safetensors", metadata={"format": "pt"})
    return str(actor), str(critic), str(reference)


def make_batch(*, restricted: bool = False, seed: int = 0) -> RolloutBatch:
    """Variable lengths, masked stretches, a sample without a trainable token (row 3), one cut by length (row 1), two groups."""
    rng = np.random.default_rng(seed)
    num, tokens = len(PROMPT_LENS), sum(RESPONSE_LENS)
    mask = rng.random(tokens) > 0.25
    starts = np.cumsum((0, *RESPONSE_LENS))
    mask[starts[:-1]] = True
    mask[starts[3] : starts[4]] = False
    finish = np.full(num, FINISH_CODES.index(FinishReason.STOP), np.int8)
    finish[1] = FINISH_CODES.index(FinishReason.LENGTH)
    responses = rng.integers(0, VOCAB, tokens).astype(np.int32)
    batch = RolloutBatch(
        rollout_id=5,
        sample_ids=np.arange(num) + 70,
        group_ids=np.array([20, 20, 21, 20, 21, 21, 21]),
        trajectory_ids=np.array([0, 1, 2, 3, 4, 2, 6]),
        prompt_lens=np.array(PROMPT_LENS),
        response_lens=np.array(RESPONSE_LENS),
        finish=finish,
        rewards=np.array([1.0, -0.5, 0.3, 2.0, -1.0, 0.3, 0.7], np.float32),
        prompt_ids=rng.integers(0, VOCAB, sum(PROMPT_LENS)).astype(np.int32),
        response_ids=responses,
        loss_mask=mask,
        rollout_log_probs=rng.normal(-3, 0.1, tokens).astype(np.float32),
    )
    return _with_supports(batch, rng) if restricted else batch


def _with_supports(batch: RolloutBatch, rng: np.random.Generator) -> RolloutBatch:
    """1 to 12 ids per trainable token, the sampled one among them; none at a masked token."""
    rows = []
    for token, trained in zip(batch.response_ids, batch.loss_mask, strict=True):
        others = np.setdiff1d(rng.permutation(VOCAB)[: rng.integers(0, 12)], [token])
        rows.append(rng.permutation(np.append(others, token)).astype(np.int32) if trained else np.zeros(0, np.int32))
    counts = np.array([len(row) for row in rows], np.int32)
    return batch.with_columns(support_counts=counts, support_ids=np.concatenate(rows))


def make_plan() -> StepPlan:
    """Three steps of 3, 3 and 1 samples; two samples of one trajectory share a step."""
    return StepPlan(5, tuple(Step(0, index, np.array(rows)) for index, rows in enumerate(STEP_ROWS)))


def make_scored_batch(seed: int = 0) -> RolloutBatch:
    """`make_batch` with the columns that training needs, random but plausible, 0 at masked tokens."""
    rng, batch = np.random.default_rng(seed + 100), make_batch(seed=seed)
    num = len(batch.loss_mask)
    columns = {
        "old_log_probs": rng.normal(-4, 1, num),
        "advantages": rng.normal(0, 1, num),
        "values": rng.normal(0, 0.3, num),
        "returns": rng.normal(0, 1, num),
    }
    return batch.with_columns(
        **{name: np.where(batch.loss_mask, values, 0.0).astype(np.float32) for name, values in columns.items()}
    )
