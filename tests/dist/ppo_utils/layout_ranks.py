"""Cases of the layout tests, and what each rank runs: whole iterations of the fast functions, results by pickle."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings
from slime_ppo.ppo_utils.reference_types import ReferenceSample, ReferenceSettings, ReferenceStep
from tests.helpers.fast_ppo import FastReport, Models, fast_iteration
from tests.helpers.layouts import Layout
from tests.helpers.ppo_cases import SHAPES, VOCAB, TinyModel, random_samples

# four ranks hold four columns each: the third has one padding column, the fourth padding only
PADDED_VOCAB = 16
STEPS = (
    ReferenceStep([4, 0, 6, 2, 8], 0.2, 0.3),
    ReferenceStep([1, 5, 3, 7], 0.2, 0.2),
    ReferenceStep([7, 2, 8, 1, 0, 5, 6, 3, 4], 0.1, 0.1),
)
_COMMON = ReferenceSettings(vocab_size=VOCAB, temperature=0.8, gamma=0.98, lambd=0.9, eps_clip_high=0.28, clip_grad=2.0)
CASES = {
    "ppo": replace(
        _COMMON,
        adaptive_lambd=0.7,
        eps_clip_c=1.5,
        entropy_coef=0.02,
        kl_loss_coef=0.1,
        correction=CorrectionSettings(mode="tis", cap=1.2, rejection="geometric", rejection_high=1.5),
    ),
    "gspo": replace(
        _COMMON,
        advantage_estimator="grpo",
        normalize_advantages=False,
        policy_loss="gspo",
        eps_clip=3e-2,
        eps_clip_high=4e-2,
        loss_reduction="seq-mean-token-mean",
        kl_loss_coef=0.1,
        kl_loss_type="k2",
        kl_support="sampled",
        correction=CorrectionSettings("icepop", "sequence", low=0.3, high=3.0, rejection="sequence", rejection_high=9.0),
    ),
    "cispo": replace(
        _COMMON,
        advantage_estimator="reinforce_plus_plus",
        policy_loss="cispo",
        eps_clip=None,
        eps_clip_high=0.1,
        kl_coef=0.1,
        entropy_coef=0.01,
        entropy_support="sampled",
        loss_reduction="seq-mean-token-sum",
        correction=CorrectionSettings(rejection="geometric", rejection_high=1.5),
    ),
}


def make_models(name: str) -> Models:
    """Weights that float32 holds exactly, in float64; the reference is near the policy."""
    critic = TinyModel(1, 2) if CASES[name].advantage_estimator == "gae" else None
    models = Models(TinyModel(PADDED_VOCAB, 0), TinyModel(PADDED_VOCAB, 0), critic)
    with torch.no_grad():
        for parameter, other in zip(models.reference.parameters(), TinyModel(PADDED_VOCAB, 1).parameters(), strict=True):
            parameter += 0.2 * other
    for model in models.all:
        model.float().double()
    return models


def make_samples(name: str) -> list[ReferenceSample]:
    """Nine samples; the engine's log-probs are near the actor's but in sample 8, which a rejection takes out.

    Of random_samples: an unrestricted row in most samples, 3 has no trainable token, 4 process rewards, 2 is cut, 0 and 6 are
    one trajectory. 3 and 7 are another, 7 is long, cut and has process rewards on masked tokens too, and 1, cut as well, is
    shorter than two chunks of two ranks.
    """
    policy = make_models(name).policy
    generator = torch.Generator().manual_seed(11)
    samples = random_samples(3, restricted=True, shapes=(*SHAPES, (5, 21), (6, 9)))
    samples[1] = replace(samples[1], bootstraps=True)
    samples[7] = replace(
        samples[7],
        bootstraps=True,
        process_rewards=torch.randn(21, generator=generator, dtype=torch.float64).tolist(),
        reward=samples[3].reward,
        trajectory_id=3,
        group_id=samples[3].group_id,
    )
    drawn = []
    for row, sample in enumerate(samples):
        old = torch.full((len(sample.response_ids),), torch.nan, dtype=torch.float64)
        old[sample.loss_mask] = reference.log_probs_and_entropy(policy, sample, CASES[name])[0].detach()
        noise = 0.2 * torch.randn(len(old), generator=generator, dtype=torch.float64) - float(row == 8)
        drawn.append(replace(sample, rollout_log_probs=(old + noise).tolist()))
    return drawn


def record_gradients(optimizer: Optimizer) -> list[list[Tensor]]:
    """A list that gets the gradients of all parameters, after clipping, at each step of the optimizer."""
    steps: list[list[Tensor]] = []

    def record(stepping: Optimizer, *_: object) -> None:
        steps.append([p.grad.clone() for group in stepping.param_groups for p in group["params"]])

    optimizer.register_step_pre_hook(record)
    return steps


@dataclass(frozen=True)
class Run:
    """What one rank has of one iteration: gradients [step][parameter] and weights of policy, then critic."""

    report: FastReport
    gradients: list[list[Tensor]]
    weights: list[Tensor]


@dataclass(frozen=True)
class Split:
    """How one iteration is cut: samples of each data-parallel rank (None = dealt in turn), and micro-batches of each."""

    num_micro_batches: int
    shares: Sequence[Sequence[int]] | None = None


def iterations(
    layout: tuple[int, int, int], names: Sequence[str], dtypes: Sequence[torch.dtype], splits: Sequence[Split]
) -> list[Run]:
    """Every case in every dtype under every split, in this order, on (tp, cp, dp) ranks."""
    groups = Layout.of(*layout)
    samples = {name: make_samples(name) for name in names}
    return [_iteration(groups, name, samples[name], dtype, split) for name in names for dtype in dtypes for split in splits]


def _iteration(layout: Layout, name: str, samples: list[ReferenceSample], dtype: torch.dtype, split: Split) -> Run:
    models = make_models(name)
    models.split(layout)
    for model in models.all:
        model.to(dtype)
    trained = [models.policy] if models.critic is None else [models.policy, models.critic]
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.5) for model in trained]
    gradients = [record_gradients(optimizer) for optimizer in optimizers]
    report = fast_iteration(
        models,
        samples,
        CASES[name],
        STEPS,
        actor_optimizer=optimizers[0],
        critic_optimizer=optimizers[1] if len(optimizers) > 1 else None,
        num_micro_batches=split.num_micro_batches,
        shares=split.shares,
        layout=layout,
    )
    per_step = [[g for part in step for g in part] for step in zip(*gradients, strict=True)]
    return Run(report, per_step, [p.detach() for p in parameters_of(trained)])


def parameters_of(models: Iterable[TinyModel]) -> list[Tensor]:
    return [parameter for model in models for parameter in model.parameters()]
