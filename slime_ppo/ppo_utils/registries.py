"""Names of advantage estimators and policy losses, and what the configuration must know of each. No torch: the driver reads it.

A registry says what an entry needs and where its function is; the ranks `load` the function. A user's own comes as a dotted
path to an EstimatorSpec or PolicyLossSpec in a module that imports no torch, and names the module that does:

    # my_losses/spec.py
    MINE = PolicyLossSpec("my_losses.mine.my_loss", eps_clip=0.2, eps_clip_high=None, dual_clip=False, reduction="token-mean")

    --policy-loss my_losses.spec.MINE
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from slime_ppo.errors import ConfigError
from slime_ppo.registry import Registry, import_dotted, split_dotted

# what the token losses of a step are divided by: denominator.py
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class EstimatorSpec:
    """An advantage estimator: (AdvantageInputs, AdvantageSettings) -> Advantages at the dotted `path`.

    `needs_critic`: it reads values. `whitens`: its advantages are whitened by default (SEMANTICS 6). `uses_token_rewards`: it
    reads the reward of every token, so KL in the reward and process rewards reach it. `uses_groups`: it compares the
    trajectories of a group. Raises ConfigError for a path of another form.
    """

    path: str
    needs_critic: bool
    whitens: bool
    uses_token_rewards: bool
    uses_groups: bool

    def __post_init__(self) -> None:
        split_dotted(self.path, origin="the path of an EstimatorSpec")


@dataclass(frozen=True)
class PolicyLossSpec:
    """A policy loss: (PolicyInputs, ClipRange) -> PolicyLoss at the dotted `path`.

    Its defaults: `eps_clip` (None = no lower clip), `eps_clip_high` (None = the same as eps_clip), `reduction`.
    `dual_clip`: it accepts one. Raises ConfigError for a path of another form and for defaults that the flags would refuse.
    """

    path: str
    eps_clip: float | None
    eps_clip_high: float | None
    dual_clip: bool
    reduction: Reduction

    def __post_init__(self) -> None:
        split_dotted(self.path, origin="the path of a PolicyLossSpec")
        spec = f"the PolicyLossSpec of {self.path}"
        if self.eps_clip is not None and not 0 < self.eps_clip <= 1:
            raise ConfigError(f"{spec} has eps_clip {self.eps_clip}; expected a number > 0 and <= 1, or None for no lower clip")
        if self.eps_clip_high is not None and not 0 < self.eps_clip_high < math.inf:
            raise ConfigError(
                f"{spec} has eps_clip_high {self.eps_clip_high}; expected a finite number > 0, or None for that of eps_clip"
            )
        if self.reduction not in get_args(Reduction):
            raise ConfigError(f"{spec} has reduction {self.reduction!r}; expected one of {', '.join(get_args(Reduction))}")


_HERE = "slime_ppo.ppo_utils"

ADVANTAGE_ESTIMATORS: Registry[EstimatorSpec] = Registry(
    "advantage estimator",
    {
        "gae": EstimatorSpec(
            f"{_HERE}.advantages.gae_advantages", needs_critic=True, whitens=True, uses_token_rewards=True, uses_groups=False
        ),
        "grpo": EstimatorSpec(
            f"{_HERE}.advantages.grpo_advantages", needs_critic=False, whitens=False, uses_token_rewards=False, uses_groups=True
        ),
        "rloo": EstimatorSpec(
            f"{_HERE}.advantages.rloo_advantages", needs_critic=False, whitens=False, uses_token_rewards=False, uses_groups=True
        ),
        "reinforce_plus_plus": EstimatorSpec(
            f"{_HERE}.advantages.reinforce_plus_plus_advantages",
            needs_critic=False,
            whitens=True,
            uses_token_rewards=True,
            uses_groups=False,
        ),
        "reinforce_plus_plus_baseline": EstimatorSpec(
            f"{_HERE}.advantages.reinforce_plus_plus_baseline_advantages",
            needs_critic=False,
            whitens=False,
            uses_token_rewards=False,
            uses_groups=True,
        ),
    },
)

POLICY_LOSSES: Registry[PolicyLossSpec] = Registry(
    "policy loss",
    {
        "ppo": PolicyLossSpec(
            f"{_HERE}.policy_loss.clipped_policy_loss", eps_clip=0.2, eps_clip_high=None, dual_clip=True, reduction="token-mean"
        ),
        "gspo": PolicyLossSpec(
            f"{_HERE}.gspo.gspo_policy_loss", eps_clip=3e-4, eps_clip_high=4e-4, dual_clip=False, reduction="seq-mean-token-mean"
        ),
        "cispo": PolicyLossSpec(
            f"{_HERE}.cispo.cispo_policy_loss", eps_clip=None, eps_clip_high=0.2, dual_clip=False, reduction="token-mean"
        ),
    },
)


def resolve_estimator(name: str, *, origin: str) -> EstimatorSpec:
    """The estimator called `name`, or the EstimatorSpec at a dotted path; `origin` is the flag or key that named it.

    Raises ConfigError that lists the known names, or says what was found at the path.
    """
    if "." not in name:
        return ADVANTAGE_ESTIMATORS.resolve(name, origin=origin)
    found = import_dotted(name, origin=origin)
    if not isinstance(found, EstimatorSpec):
        raise ConfigError(_wrong_kind(name, found, EstimatorSpec, origin=origin))
    return found


def resolve_policy_loss(name: str, *, origin: str) -> PolicyLossSpec:
    """The policy loss called `name`, or the PolicyLossSpec at a dotted path; `origin` is the flag or key that named it.

    Raises ConfigError that lists the known names, or says what was found at the path.
    """
    if "." not in name:
        return POLICY_LOSSES.resolve(name, origin=origin)
    found = import_dotted(name, origin=origin)
    if not isinstance(found, PolicyLossSpec):
        raise ConfigError(_wrong_kind(name, found, PolicyLossSpec, origin=origin))
    return found


def load(path: str) -> Callable[..., Any]:
    """The function at the `path` of a spec; called on the ranks, where torch is. Raises ConfigError with the reason if it fails."""
    found = import_dotted(path, origin="the path of a spec")
    if not callable(found):
        raise ConfigError(f"the path of a spec, {path}, holds a {type(found).__name__}; expected a function")
    return found


def _wrong_kind(name: str, found: object, expected: type, *, origin: str) -> str:
    return (
        f"{origin}: {name} is a {type(found).__name__}; expected an object of type {expected.__name__} "
        f"(slime_ppo.ppo_utils.registries), which says where the function is and what it needs"
    )
