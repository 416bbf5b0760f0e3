"""Section `correction`: what is done about the difference between the engine's log-probs and the trainer's (SEMANTICS 12).

rho is the ratio of the old policy to the engine's, of a token or of a whole sample. In YAML the keys carry no prefix
(`correction: {mode: tis}`); the flags do (`--rollout-correction tis`).
"""

from dataclasses import dataclass, replace

from slime_ppo.config.fields import option
from slime_ppo.ppo_utils.off_policy_stats import CorrectionLevel, CorrectionMode, CorrectionSettings, Rejection

_REACHES_1 = "rho is 1 where engine and trainer agree: a range without 1 throws such tokens away"


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights and rejection from the ratio rho of the trainer's old policy to the engine's."""

    mode: CorrectionMode = option(
        "none",
        flag="--rollout-correction",
        help="weight of a token's policy loss: 1, min(rho, cap), or rho inside [low, high] and 0 outside",
    )
    level: CorrectionLevel = option(
        "token", flag="--rollout-correction-level", help="rho of each token, or one rho of the whole sample (the product)"
    )
    cap: float | None = option(
        None, flag="--rollout-correction-cap", help="largest weight of tis", default_text="2.0 with tis", at_least=1, why=_REACHES_1
    )
    low: float | None = option(
        None,
        flag="--rollout-correction-low",
        help="smallest rho that icepop keeps",
        default_text="0.5 with icepop",
        at_least=0,
        at_most=1,
        why=_REACHES_1,
    )
    high: float | None = option(
        None,
        flag="--rollout-correction-high",
        help="largest rho that icepop keeps",
        default_text="5.0 with icepop",
        at_least=1,
        why=_REACHES_1,
    )
    rejection: Rejection = option(
        "none",
        flag="--rollout-rejection",
        help="leave out whole samples by the product, or the geometric mean, of their tokens' rho; denominators keep them",
    )
    rejection_low: float | None = option(
        None,
        flag="--rollout-rejection-low",
        help="a sample below this is rejected; 0 opens that side",
        default_text="0.5 with sequence, 0.999 with geometric",
        at_least=0,
        at_most=1,
        why=_REACHES_1,
    )
    rejection_high: float | None = option(
        None,
        flag="--rollout-rejection-high",
        help="a sample above this is rejected",
        default_text="2.0 with sequence, 1.001 with geometric",
        at_least=1,
        why=_REACHES_1,
    )
    use_rollout_log_probs: bool = option(
        False,
        help="bypass: the engine's log-probs are the old log-probs, none are recomputed; the ratio then corrects by itself",
    )

    @property
    def active(self) -> bool:
        """True when tokens are weighted or samples rejected."""
        return self.mode != "none" or self.rejection != "none"

    @property
    def resolved(self) -> "CorrectionConfig":
        """The same with its defaults filled in: numbers for the bounds in use, None for all others."""
        rejected = {"none": (None, None), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}[self.rejection]
        return replace(
            self,
            cap=_default(self.cap, 2.0 if self.mode == "tis" else None),
            low=_default(self.low, 0.5 if self.mode == "icepop" else None),
            high=_default(self.high, 5.0 if self.mode == "icepop" else None),
            rejection_low=_default(self.rejection_low, rejected[0]),
            rejection_high=_default(self.rejection_high, rejected[1]),
        )

    @property
    def settings(self) -> CorrectionSettings:
        """What ppo_utils computes with, defaults filled in."""
        bounds = self.resolved
        return CorrectionSettings(
            mode=bounds.mode,
            level=bounds.level,
            cap=bounds.cap,
            low=bounds.low,
            high=bounds.high,
            rejection=bounds.rejection,
            rejection_low=bounds.rejection_low,
            rejection_high=bounds.rejection_high,
        )


def _default(given: float | None, default: float | None) -> float | None:
    """`given`, or the default; None where the bound has no default, because nothing uses it."""
    return None if default is None else default if given is None else given
