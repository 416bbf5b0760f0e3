"""Settings and statistics of the rollout correction (SEMANTICS 12). No torch: the driver checks the one and merges the other."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from slime_ppo.errors import ConfigError

CorrectionMode = Literal["none", "tis", "icepop"]
CorrectionLevel = Literal["token", "sequence"]
Rejection = Literal["none", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionSettings:
    """How the policy loss is corrected for samples that another policy drew (the engine's, or an older one).

    `mode` none: weight 1; tis: min(rho, cap); icepop: rho inside [low, high], else 0; rho per token or per sequence (`level`).
    `rejection`: samples whose ratio lies outside [rejection_low, rejection_high] leave; the ratio is that of the whole sequence
    or its geometric mean per token. A bound that is None is open; one of the two is needed. Values that the mode does not
    use are not looked at. Raises ConfigError naming the flag.
    """

    mode: CorrectionMode = "none"
    level: CorrectionLevel = "token"
    cap: float | None = None
    low: float | None = None
    high: float | None = None
    rejection: Rejection = "none"
    rejection_low: float | None = None
    rejection_high: float | None = None

    def __post_init__(self) -> None:
        _require_known(self.mode, get_args(CorrectionMode), "--rollout-correction")
        _require_known(self.level, get_args(CorrectionLevel), "--rollout-correction-level")
        _require_known(self.rejection, get_args(Rejection), "--rollout-rejection")
        if self.mode == "tis" and (self.cap is None or not 0 < self.cap < math.inf):
            raise ConfigError(
                f"rollout correction tis has the cap {self.cap}; expected a finite number > 0, 2 for example "
                "(--rollout-correction-cap)"
            )
        if self.mode == "icepop":
            _require_range(self.low, self.high, "--rollout-correction")
        if self.rejection != "none":
            _require_range(self.rejection_low, self.rejection_high, "--rollout-rejection")


def _require_known(name: str, known: tuple[str, ...], flag: str) -> None:
    if name not in known:
        raise ConfigError(f"{flag} is {name!r}; expected one of {', '.join(known)}")


def _require_range(low: float | None, high: float | None, flag: str) -> None:
    """Bounds of an importance ratio: 0 <= low < high; None is open, but not on both sides."""
    if low is None and high is None:
        raise ConfigError(f"neither {flag}-low nor {flag}-high is set; expected a bound of the ratio on at least one side")
    if (low is not None and not 0 <= low < math.inf) or (high is not None and not 0 < high < math.inf):
        raise ConfigError(
            f"the ratio is to be kept inside [{low}, {high}]; expected finite numbers, the lower >= 0 and the upper > 0 "
            f"({flag}-low, {flag}-high)"
        )
    if low is not None and high is not None and not low < high:
        raise ConfigError(f"the ratio is to be kept inside [{low}, {high}]; expected low < high ({flag}-low, {flag}-high)")


@dataclass(frozen=True)
class Mismatch:
    """How far the policy that drew the tokens is from the one that trains on them, as sums that merge over ranks and batches.

    With d = old_log_prob - rollout_log_prob of a trainable token, d' = clamp(d, +-20) and rho = exp(d'):
    `abs_sum` of |d|, `max_abs`, `k3_sum` of rho - 1 - d', `rho_sum`, `rho_square_sum`. Means of no token are 0.
    """

    num_tokens: int = 0
    abs_sum: float = 0.0
    max_abs: float = 0.0
    k3_sum: float = 0.0
    rho_sum: float = 0.0
    rho_square_sum: float = 0.0

    def merge(self, other: "Mismatch") -> "Mismatch":
        """The mismatch of both sets of tokens together."""
        return Mismatch(
            num_tokens=self.num_tokens + other.num_tokens,
            abs_sum=self.abs_sum + other.abs_sum,
            max_abs=max(self.max_abs, other.max_abs),
            k3_sum=self.k3_sum + other.k3_sum,
            rho_sum=self.rho_sum + other.rho_sum,
            rho_square_sum=self.rho_square_sum + other.rho_square_sum,
        )

    @property
    def mean_abs(self) -> float:
        """Token mean of |old - rollout|, in nats."""
        return self.abs_sum / max(self.num_tokens, 1)

    @property
    def k3(self) -> float:
        """Token mean of exp(d) - 1 - d: the KL of the rollout policy to the old one, from the rollout's tokens."""
        return self.k3_sum / max(self.num_tokens, 1)

    @property
    def ratio_mean(self) -> float:
        """Token mean of rho: 1 up to sampling noise, and exactly 1 where both policies agree; 1 without a token.

        Tokens drawn from a support but scored over the whole vocabulary give the mean probability of the supports instead.
        """
        return self.rho_sum / self.num_tokens if self.num_tokens else 1.0

    @property
    def ess(self) -> float:
        """Effective share of the tokens, (sum rho)^2 / (n sum rho^2) in (0, 1]; 1 without a token, as without a mismatch.

        Kong, "A note on importance sampling using standardized weights" (1992).
        """
        if self.num_tokens == 0:
            return 1.0
        return self.rho_sum**2 / (self.num_tokens * self.rho_square_sum)
