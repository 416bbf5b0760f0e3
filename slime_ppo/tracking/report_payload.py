"""What report.html holds: a run reduced to the numbers and samples that its charts and viewer show, as one JSON object."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord, eval_sets

# Response tokens embedded in the page; a token costs about 60 bytes. All logged samples stay in samples.jsonl.
MAX_SAMPLE_TOKENS = 60_000
_METRIC_DIGITS = 5
_TOKEN_DIGITS = 3


def rounded(value: float, digits: int) -> float | None:
    """`value` to this many significant digits; None when it is NaN or infinite, which JSON does not have."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def thin_samples(samples: Sequence[SampleRecord], *, max_tokens: int) -> tuple[SampleRecord, ...]:
    """Samples of evenly spread rollouts, first and last among them, of about `max_tokens` response tokens; in rollout order.

    A rollout's samples stay together. The first and the last rollout stay, however long their responses are.
    """
    ordered = tuple(sorted(samples, key=lambda sample: sample.rollout_id))
    num_tokens = sum(len(sample.tokens) for sample in ordered)
    if num_tokens <= max_tokens:
        return ordered
    ids = sorted({sample.rollout_id for sample in ordered})
    num_kept = min(len(ids), max(2, len(ids) * max_tokens // num_tokens))
    kept = {ids[round(i * (len(ids) - 1) / max(num_kept - 1, 1))] for i in range(num_kept)}
    return tuple(sample for sample in ordered if sample.rollout_id in kept)


class SampleKeeper:
    """Collects the samples of a run within a bounded memory, whatever its length; `samples` are those that a page shows."""

    def __init__(self, *, max_tokens: int = MAX_SAMPLE_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._samples: list[SampleRecord] = []
        self._num_tokens = 0

    def add(self, samples: Iterable[SampleRecord]) -> None:
        """Rollouts come in order. What is dropped is dropped for good."""
        for sample in samples:
            self._samples.append(sample)
            self._num_tokens += len(sample.tokens)
            # at twice the page's share, so that thinning is rare
            if self._num_tokens > 2 * self._max_tokens:
                self._samples = list(self.samples)
                self._num_tokens = sum(len(kept.tokens) for kept in self._samples)

    @property
    def samples(self) -> tuple[SampleRecord, ...]:
        return thin_samples(self._samples, max_tokens=self._max_tokens)


def report_payload(run: RunInfo, records: Sequence[RolloutRecord], samples: Sequence[SampleRecord]) -> dict[str, Any]:
    """The object that the page reads; it holds every one of `samples`.

    Each metric and phase is one array over the rollouts in order, null where it has no value; `phrases` is one list per rollout.
    """
    ordered = sorted(records, key=lambda record: record.rollout_id)
    metric_names = sorted({name for record in ordered for name in record.metrics})
    phase_names = list(dict.fromkeys(name for record in ordered for name in record.phases))
    return {
        "title": run.title,
        "runFolder": run.run_dir.name,
        "numRollout": run.num_rollout,
        "notes": list(run.notes),
        "config": run.config_yaml,
        "rollouts": [record.rollout_id for record in ordered],
        "criticOnly": [record.critic_only for record in ordered],
        "metrics": {
            name: [rounded(record.metrics[name], _METRIC_DIGITS) if name in record.metrics else None for record in ordered]
            for name in metric_names
        },
        "evalSets": eval_sets(metric_names),
        "phases": [
            {
                "name": name,
                "seconds": [rounded(record.phases[name], _METRIC_DIGITS) if name in record.phases else None for record in ordered],
            }
            for name in phase_names
        ],
        "phrases": [
            [{"text": phrase.text, "share": rounded(phrase.share, _METRIC_DIGITS)} for phrase in record.phrases]
            for record in ordered
        ],
        "samples": [_sample(sample) for sample in samples],
    }


def _sample(sample: SampleRecord) -> dict[str, Any]:
    return {
        "rollout": sample.rollout_id,
        "id": sample.sample_id,
        "kind": sample.kind,
        "dataSet": sample.data_set,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": rounded(sample.reward, _METRIC_DIGITS),
        "finish": sample.finish,
        "tokens": list(sample.tokens),
        "logProbs": _token_column(sample.log_probs),
        "refLogProbs": _token_column(sample.ref_log_probs),
        "values": _token_column(sample.values),
        "advantages": _token_column(sample.advantages),
        "returns": _token_column(sample.returns),
        "mask": [int(trainable) for trainable in sample.loss_mask],
    }


def _token_column(values: Iterable[float]) -> list[float | None]:
    return [rounded(value, _TOKEN_DIGITS) for value in values]


def script_json(payload: object) -> str:
    """JSON that can stand inside a <script> element.

    Model text may hold "</script>" or "<!--": with every "<" escaped nothing in it can end the element or change how the
    rest of the page is parsed. Non-ASCII characters are escaped as well, lone surrogates among them.
    """
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
