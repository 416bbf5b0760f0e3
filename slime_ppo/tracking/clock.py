"""Seconds per phase of a rollout, and which phase the run is in."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

PHASES = ("generate", "reward", "log-probs", "values", "critic train", "actor train", "weight sync", "wake", "offload", "evaluate")
# the actor makes the advantages where there is no critic
CRITIC_FREE_PHASES = ("generate", "reward", "log-probs", "advantages", "actor train", "weight sync", "wake", "offload", "evaluate")
_METRIC_OF_PHASE = {
    "generate": "rollout_time",
    "reward": "reward_time",
    "log-probs": "log_probs_time",
    "values": "values_time",
    "advantages": "advantages_time",
    "critic train": "critic_train_time",
    "actor train": "actor_train_time",
    "weight sync": "update_weights_time",
    "wake": "wake_time",
    "offload": "offload_time",
    "evaluate": "eval_time",
    "other": "other_time",
}


class RunClock:
    """Phases do not nest; what lies between them is reported as "other". `where` names the present place for messages."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self._phases = tuple(phases)
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self.where = "start-up"
        self._rollout = "start-up"

    def start_rollout(self, rollout_id: int) -> None:
        """Begin counting anew."""
        self._seconds = dict.fromkeys(self._phases, 0.0)
        self._started = time.perf_counter()
        self._rollout = self.where = f"rollout {rollout_id}"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase. After a failure inside, `where` still names it."""
        self.where = f"{self._rollout}, {name}"
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)
        self.where = self._rollout

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def phases(self) -> dict[str, float]:
        """Seconds per phase of this rollout in the order given, "other" last; together they are the rollout's time."""
        whole = time.perf_counter() - self._started
        return self._seconds | {"other": max(0.0, whole - sum(self._seconds.values()))}


def phase_metrics(phases: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """perf/ metrics of a rollout; `num_tokens` counts prompt and response tokens of its samples."""
    whole = sum(phases.values())
    metrics = {f"perf/{_METRIC_OF_PHASE[phase]}": seconds for phase, seconds in phases.items()}
    return metrics | {"perf/step_time": whole, "perf/tokens_per_s": num_tokens / whole}
