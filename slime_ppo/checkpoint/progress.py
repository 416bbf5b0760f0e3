"""The training loop's own state: all that a resumed loop needs besides what its parts keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.config.roles import ROLE_NAMES, RoleName
from slime_ppo.ppo_utils.kl_controller import AdaptiveKL, FixedKL
from slime_ppo.types.sample import Sample


@dataclass
class Progress:
    """Where the loop stands. At any moment at which a run may be stopped, it is what a checkpoint holds.

    `rollout_id` is the present rollout, or the next one between two. `prompts` is the prompts' state at its start, and after its
    draw once `samples` are there: those of this rollout that wait for their training.
    """

    kl: FixedKL | AdaptiveKL
    prompts: Mapping[str, object]
    rollout_id: int = 0
    version: int = 0
    skipped_in_a_row: dict[RoleName, int] = field(default_factory=lambda: dict.fromkeys(ROLE_NAMES, 0))
    samples: tuple[Sample, ...] = ()

    @classmethod
    def start(cls, ppo: PpoConfig, prompts: Mapping[str, object]) -> Self:
        """That of a run that begins, with `prompts` as they are before the first draw."""
        return cls(kl=kl_controller(ppo), prompts=prompts)

    @classmethod
    def restored(cls, state: Mapping[str, Any], samples: Sequence[Sample], ppo: PpoConfig) -> Self:
        """As `state` has it. A fixed beta is the config's, which may have changed; one that adapts goes on where it was."""
        adapts = ppo.kl_controller == "adaptive"
        return cls(
            kl=kl_controller(ppo, beta=float(state["kl_beta"]) if adapts else ppo.kl_coef),
            rollout_id=int(state["rollout_id"]),
            version=int(state["weight_version"]),
            skipped_in_a_row={role: int(state["skipped_in_a_row"][role]) for role in ROLE_NAMES},
            prompts=state["prompts"],
            samples=tuple(samples),
        )

    def state_dict(self) -> dict[str, object]:
        """JSON values; the samples are for a file of their own."""
        return {
            "rollout_id": self.rollout_id,
            "weight_version": self.version,
            "kl_beta": self.kl.beta,
            "skipped_in_a_row": dict(self.skipped_in_a_row),
            "prompts": dict(self.prompts),
        }

    def has_collected(self, samples: Sequence[Sample], prompts: Mapping[str, object]) -> None:
        """The rollout's samples are there; `prompts` is the state after its draw."""
        self.samples, self.prompts = tuple(samples), prompts

    def has_trained(self) -> None:
        """The rollout is over."""
        self.rollout_id, self.samples = self.rollout_id + 1, ()


def kl_controller(ppo: PpoConfig, *, beta: float | None = None) -> FixedKL | AdaptiveKL:
    """What --kl-controller names, from --kl-coef or a later `beta` on."""
    first = ppo.kl_coef if beta is None else beta
    if ppo.kl_controller == "fixed" or ppo.kl_target is None or ppo.kl_horizon is None:
        return FixedKL(first)
    return AdaptiveKL(first, target=ppo.kl_target, horizon=ppo.kl_horizon)
