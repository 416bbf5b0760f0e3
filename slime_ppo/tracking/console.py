"""One line per rollout and one per optimizer step; a progress bar when the stream is a terminal.

rollout 21/3000  reward 0.412 (+0.018)  len 812 (2.3% cut)  gap 0.011 | gen 38.2s  critic 9.1s  actor 12.4s  sync 2.9s | eta 2d 04h
  step 21  pg -0.0031  kl 0.0004  clip 0.7%  ent 0.41  gnorm 0.83  lr 1.0e-06 | critic vf 0.092  ev 0.63  gnorm 1.4

Rollouts and steps carry their ids, counted from 0 as in metrics.jsonl, checkpoints and errors; the bar counts finished rollouts.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord, eval_sets

# phases that a person can do something about; the rest is in the report
_SHOWN_PHASES = (
    ("generate", "gen"),
    ("both train", "both"),
    ("critic train", "critic"),
    ("actor train", "actor"),
    ("weight sync", "sync"),
)
_ETA_WINDOW = 10
_Format = Callable[[float], str]


def short_number(value: float) -> str:
    """Two significant digits, in the shortest form that a person reads at a glance: 0.41, 12, -0.0031, 5.1e-06."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if size < 1e-4 or size >= 1e5:
        return f"{value:.1e}"
    decimals = min(max(1 - math.floor(math.log10(size)), 0), 4)
    return f"{value:.{decimals}f}"


def percent(share: float) -> str:
    """A share of 1 in percent with one decimal; none at the two ends."""
    return f"{100 * share:.0f}%" if share in (0.0, 1.0) else f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """The two largest units: 2d 04h, 3h 12m, 4m 30s, 12s."""
    whole = round(seconds)
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d {hours_left:02d}h"
    if hours:
        return f"{hours}h {minutes_left:02d}m"
    return f"{minutes}m {seconds_left:02d}s" if minutes else f"{seconds_left}s"


def _plural(unit: str) -> str:
    return f"{unit}es" if unit.endswith("ch") else f"{unit}s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds >= 1 else f"{seconds:.2f}s"


def _length(tokens: float) -> str:
    return f"{tokens:.0f}" if tokens >= 100 else f"{tokens:.3g}"


def _learning_rate(rate: float) -> str:
    return f"{rate:.1e}"


_POLICY_COLUMNS: tuple[tuple[str, str, _Format], ...] = (
    ("pg_loss", "pg", short_number),
    ("ppo_kl", "kl", short_number),
    ("pg_clipfrac", "clip", percent),
    ("entropy", "ent", short_number),
    ("grad_norm", "gnorm", short_number),
    ("lr", "lr", _learning_rate),
)
_CRITIC_COLUMNS: tuple[tuple[str, str, _Format], ...] = (
    ("value_loss", "vf", short_number),
    ("explained_variance", "ev", short_number),
    ("critic_grad_norm", "gnorm", short_number),
)
# of a batch of supervised fine-tuning, by metric
_SFT_COLUMNS: tuple[tuple[str, str, _Format], ...] = (
    ("train/loss", "nll", lambda value: f"{value:.4f}"),
    ("eval/nll", "held-out nll", lambda value: f"{value:.4f}"),
    ("train/grad_norm", "gnorm", short_number),
    ("train/lr-pg_0", "lr", _learning_rate),
)


def _columns(values: Mapping[str, float], columns: Sequence[tuple[str, str, _Format]]) -> str:
    return "  ".join(f"{label} {form(values[name])}" for name, label, form in columns if name in values)


def step_line(step: Mapping[str, float]) -> str:
    """One optimizer step of both roles; a role that did not train is left out."""
    policy = _columns(step, _POLICY_COLUMNS)
    critic = _columns(step, _CRITIC_COLUMNS)
    policy_part = f"  {policy}" if policy else ""
    separator = " | " if policy else "  "
    critic_part = f"{separator}critic {critic}" if critic else ""
    return f"  step {step['step']:.0f}{policy_part}{critic_part}"


def rollout_line(
    record: RolloutRecord,
    *,
    num_rollout: int,
    previous_reward: float | None,
    eta_s: float | None,
    unit: str = "rollout",
) -> str:
    """The outcome of a rollout, which the line calls `unit`; `previous_reward` gives the change in brackets. Metrics without a
    value are left out."""
    metrics = record.metrics
    head = f"{unit} {record.rollout_id}/{num_rollout}" + (" (critic only)" if record.critic_only else "")
    parts = [head]
    if "rollout/raw_reward" in metrics:
        reward = metrics["rollout/raw_reward"]
        change = "" if previous_reward is None else f" ({reward - previous_reward:+.3f})"
        parts.append(f"reward {reward:.3f}{change}")
    else:
        parts += filter(None, [_columns(metrics, _SFT_COLUMNS)])
    parts += [f"{name} {metrics[f'eval/{name}']:.3f}" for name in eval_sets(metrics)]
    if "rollout/response_len/mean" in metrics:
        cut = f" ({percent(metrics['rollout/truncated_ratio'])} cut)" if "rollout/truncated_ratio" in metrics else ""
        parts.append(f"len {_length(metrics['rollout/response_len/mean'])}{cut}")
    if "rollout/logprob_gap_max" in metrics:
        parts.append(f"gap {short_number(metrics['rollout/logprob_gap_max'])}")
    blocks = ["  ".join(parts)]
    times = "  ".join(f"{label} {_seconds(record.phases[name])}" for name, label in _SHOWN_PHASES if name in record.phases)
    if times:
        blocks.append(times)
    if eta_s is not None:
        blocks.append(f"eta {duration(eta_s)}")
    return " | ".join(blocks)


class ConsoleTracker:
    """Writes lines to `stream` (standard output when None)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._recent_times_s: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._previous_reward: float | None = None
        self._num_rollout = 0
        self._unit = "rollout"
        self._bar: tqdm[None] | None = None

    def start(self, run: RunInfo) -> None:
        self._num_rollout, self._unit = run.num_rollout, run.unit
        self._write(f"{run.title}: {run.num_rollout} {_plural(run.unit)} into {run.run_dir}")
        for note in run.notes:
            self._write(f"note: {note}")
        if self._stream.isatty():
            self._bar = tqdm(
                total=run.num_rollout,
                initial=run.start_rollout,
                file=self._stream,
                desc=_plural(run.unit),
                leave=False,
                dynamic_ncols=True,
            )

    def log(self, record: RolloutRecord) -> None:
        if "perf/step_time" in record.metrics:
            self._recent_times_s.append(record.metrics["perf/step_time"])
        self._write(
            rollout_line(
                record,
                num_rollout=self._num_rollout,
                previous_reward=self._previous_reward,
                eta_s=self._eta_s(record),
                unit=self._unit,
            )
        )
        for step in record.steps:
            self._write(step_line(step))
        if "rollout/raw_reward" in record.metrics:
            self._previous_reward = record.metrics["rollout/raw_reward"]
        if self._bar is not None:
            self._bar.update()

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        """Samples are for the report; the console shows none."""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _eta_s(self, record: RolloutRecord) -> float | None:
        """Rollouts left times the mean time of recent ones, so that warm-up rollouts stop counting."""
        if not self._recent_times_s:
            return None
        rollouts_left = self._num_rollout - 1 - record.rollout_id
        return rollouts_left * sum(self._recent_times_s) / len(self._recent_times_s)

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)
