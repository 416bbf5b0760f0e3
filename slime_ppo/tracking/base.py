"""What the trainer hands to every tracker, and the seam they share: start, log, log_table, close."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from slime_ppo.errors import DataError
from slime_ppo.tracking.phrases import Phrase

SampleKind = Literal["train", "eval"]
PER_TOKEN_COLUMNS = ("log_probs", "ref_log_probs", "values", "advantages", "returns", "loss_mask")
# what a role that had its turn always reports, also when none of its steps ran
_ACTOR_TURN, _CRITIC_TURN = "train/skipped_steps", "train/critic-skipped_steps"


@dataclass(frozen=True)
class RunInfo:
    """The run as a whole. `start_rollout` is 0, or the first rollout of a resumed run: what trackers hold of that rollout
    and later ones is from before the interruption and is replaced. `run_id` is the same before and after; None: it is not resumed
    under it."""

    title: str
    run_dir: Path
    num_rollout: int
    config_yaml: str
    notes: tuple[str, ...]
    start_rollout: int = 0
    run_id: str | None = None


@dataclass(frozen=True)
class RolloutRecord:
    """Everything measured in one rollout.

    `metrics` by full name ("train/pg_loss"); a metric without a value is absent. `steps` has one mapping per optimizer
    step ("step", "pg_loss", "value_loss", ...; policy names absent in critic-only rollouts). `phases` are seconds in the
    order in which the phases ran. `phrases` are the most common ones of all its responses, most common first.
    """

    rollout_id: int
    metrics: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]
    phases: Mapping[str, float]
    phrases: tuple[Phrase, ...] = ()

    @property
    def critic_only(self) -> bool:
        """True when the critic had its turn and the actor had none (one that skipped its steps had)."""
        return _CRITIC_TURN in self.metrics and _ACTOR_TURN not in self.metrics


@dataclass(frozen=True)
class SampleRecord:
    """One answer, for people to read. `tokens` are the R response tokens as text.

    Every per-token column has R entries, or none when it was not computed (evaluation, runs without a reference).
    `data_set` names the one of an evaluation; it is empty for training.
    Raises DataError when a column has another length.
    """

    rollout_id: int
    sample_id: int
    prompt: str
    response: str
    reward: float
    finish: str
    tokens: tuple[str, ...]
    log_probs: tuple[float, ...]
    ref_log_probs: tuple[float, ...]
    values: tuple[float, ...]
    advantages: tuple[float, ...]
    returns: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    kind: SampleKind
    data_set: str = ""

    def __post_init__(self) -> None:
        for name in PER_TOKEN_COLUMNS:
            found = len(getattr(self, name))
            if found not in (0, len(self.tokens)):
                raise DataError(
                    f"{name} of logged sample {self.sample_id} of rollout {self.rollout_id} has {found} entries, "
                    f"expected {len(self.tokens)} (one per response token) or none"
                )


def eval_sets(metrics: Iterable[str]) -> tuple[str, ...]:
    """The data sets whose mean rewards are among these metric names, in their order."""
    names = dict.fromkeys(metrics)
    of_eval = (name.removeprefix("eval/") for name in names if name.startswith("eval/"))
    return tuple(name for name in of_eval if f"eval/{name}_response_len" in names)


class Tracker(Protocol):
    """Where metrics and samples go. Calls come from one thread: start, then any number of log and log_table, then close."""

    def start(self, run: RunInfo) -> None: ...

    def log(self, record: RolloutRecord) -> None: ...

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None: ...

    def close(self) -> None: ...


class TrackerSet:
    """Hands every call to every tracker, in the order given. A tracker itself.

    `start` ends at the first tracker that fails; the other calls reach every tracker, then raise the first failure: what
    one cannot send must not be missing in the files of the others.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def start(self, run: RunInfo) -> None:
        for tracker in self._trackers:
            tracker.start(run)

    def log(self, record: RolloutRecord) -> None:
        self._hand_to_all(lambda tracker: tracker.log(record))

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        self._hand_to_all(lambda tracker: tracker.log_table(rollout_id, samples))

    def close(self) -> None:
        self._hand_to_all(lambda tracker: tracker.close())

    def _hand_to_all(self, call: Callable[[Tracker], None]) -> None:
        failures: list[Exception] = []
        for tracker in self._trackers:
            try:
                call(tracker)
            except Exception as failure:  # the others still have files to write
                failures.append(failure)
        if failures:
            raise failures[0]
