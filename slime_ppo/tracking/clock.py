"""Seconds per phase of a rollout, and which phase the run is in."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

_LAST = ("weight sync", "wake", "offload", "evaluate", "save")
PHASES = ("generate", "reward", "log-probs", "values", "critic train", "actor train", *_LAST)
# devices of their own: critic and actor train at the same time, then the slower one alone
SIDE_BY_SIDE_PHASES = (*PHASES[:4], "both train", *PHASES[4:])
# the actor makes the advantages where there is no critic
CRITIC_FREE_PHASES = ("generate", "reward", "log-probs", "advantages", "actor train", *_LAST)
# nothing is trained
ROLLOUT_PHASES = ("generate", "reward", "weight sync", "wake", "offload", "evaluate")
# of supervised fine-tuning
SFT_PHASES = ("actor train", "evaluate", "save")
_START_UP = "start-up"
_METRIC_OF_PHASE = {
    "generate": "rollout_time",
    "reward": "reward_time",
    "log-probs": "log_probs_time",
    "values": "values_time",
    "advantages": "advantages_time",
    "critic train": "critic_train_time",
    "actor train": "actor_train_time",
    "both train": "both_train_time",
    "weight sync": "update_weights_time",
    "wake": "wake_time",
    "offload": "offload_time",
    "evaluate": "eval_time",
    "save": "save_time",
    "other": "other_time",
}


def run_phases(*, has_critic: bool, side_by_side: bool) -> tuple[str, ...]:
    """The phases of a run, in the order in which they come."""
    if not has_critic:
        return CRITIC_FREE_PHASES
    return SIDE_BY_SIDE_PHASES if side_by_side else PHASES


class RunClock:
    """What lies between phases is reported as "other". A phase inside another is taken out of the outer one's time, so that all
    together are the rollout's. What comes after a rollout's report, the report's own writing and a save, counts for the next one,
    which it delays. `where` names the present place for messages."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self._phases = tuple(phases)
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self.where = self._rollout = _START_UP
        self._open: list[str] = []
        self._counted = 0.0  # seconds counted so far, by whatever phase

    def start_rollout(self, rollout_id: int) -> None:
        """From the end of the rollout before it on, or of the start-up, time is this rollout's."""
        if self._rollout == _START_UP:
            self._count_anew()
        self._rollout = self.where = f"rollout {rollout_id}"

    def end_rollout(self) -> dict[str, float]:
        """Seconds per phase of this rollout in the order given, "other" last; together they are the rollout's time. Begins counting
        anew."""
        whole = time.perf_counter() - self._started
        seconds = self._seconds | {"other": max(0.0, whole - sum(self._seconds.values()))}
        self._count_anew()
        return seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase. After a failure inside, `where` still names it."""
        self.where = f"{self._rollout}, {name}"
        self._open.append(name)
        start, counted = time.perf_counter(), self._counted
        try:
            yield
        finally:
            self._open.pop()
            self.add(name, time.perf_counter() - start - (self._counted - counted))
        self.where = ", ".join([self._rollout, *self._open[-1:]])

    @contextmanager
    def both_train(self) -> Iterator[Callable[[str], None]]:
        """Time critic and actor that train at the same time: call what is given with "critic" or "actor" when that one has ended.
        Until the first has, the phase is "both train"; from then on it is the other's."""
        self.where = f"{self._rollout}, critic train beside actor train"
        start = time.perf_counter()
        ends: dict[str, float] = {}

        def ended(role: str) -> None:
            ends[role] = time.perf_counter()

        yield ended
        (_, first), (last, end) = ends.items()
        self.add("both train", first - start)
        self.add(f"{last} train", end - first)
        self.where = self._rollout

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._counted += seconds

    def _count_anew(self) -> None:
        self._seconds = dict.fromkeys(self._phases, 0.0)
        self._started = time.perf_counter()


def phase_metrics(phases: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """perf/ metrics of a rollout; `num_tokens` counts prompt and response tokens of its samples. Roles that train side by side
    have each its own time; phases add up to the rollout's, these two do not."""
    whole = sum(phases.values())
    metrics = {f"perf/{_METRIC_OF_PHASE[phase]}": seconds for phase, seconds in phases.items()}
    if "both train" in phases:
        metrics["perf/critic_train_time"] += phases["both train"]
        metrics["perf/actor_train_time"] += phases["both train"]
    return metrics | {"perf/step_time": whole, "perf/tokens_per_s": num_tokens / whole}
