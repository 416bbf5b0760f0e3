"""Samples as plain arrays and JSON values, and back to equal samples: what rollout files hold.

Shapes: S samples, P different prompts; ragged columns lie one sample (or prompt) after the other in one flat array.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_ppo.errors import DataError
from slime_ppo.types.rollout_batch import FINISH_CODES
from slime_ppo.types.sample import Prompt, Sample, Support, VersionSpan

_IDS: Mapping[str, Callable[[Sample], int]] = {
    "sample_ids": lambda sample: sample.sample_id,
    "group_ids": lambda sample: sample.group_id,
    "trajectory_ids": lambda sample: sample.trajectory_id,
    "num_cached_tokens": lambda sample: sample.num_cached_tokens,
    "response_lens": lambda sample: len(sample.response_ids),
    "finish": lambda sample: FINISH_CODES.index(sample.finish),
    "reward_cut": lambda sample: int(sample.reward_cut),
    "num_spans": lambda sample: len(sample.weight_versions),
}
# flat array -> its dtype and a sample's part of it; None where this sample has none
_RAGGED: Mapping[str, tuple[type, Callable[[Sample], np.ndarray | None]]] = {
    "response_ids": (np.int32, lambda sample: sample.response_ids),
    "loss_mask": (np.bool_, lambda sample: sample.loss_mask),
    "rollout_log_probs": (np.float32, lambda sample: sample.rollout_log_probs),
    "full_log_probs": (np.float32, lambda sample: sample.full_log_probs),
    "process_rewards": (np.float32, lambda sample: sample.process_rewards),
    "support_counts": (np.int32, lambda sample: None if sample.support is None else sample.support.counts),
    "support_ids": (np.int32, lambda sample: None if sample.support is None else sample.support.ids),
}


@dataclass(frozen=True)
class PackedSamples:
    """`arrays` by name, and `texts`: JSON values of prompts and responses."""

    arrays: Mapping[str, np.ndarray]
    texts: Mapping[str, Any]


def pack_samples(samples: Sequence[Sample]) -> PackedSamples:
    """A prompt that several samples share is kept once. Metadata that JSON does not know is kept as text."""
    prompts = {id(sample.prompt): sample.prompt for sample in samples}
    row_of = {key: row for row, key in enumerate(prompts)}
    spans = [(span.version, span.start, span.end) for sample in samples for span in sample.weight_versions]
    arrays = {name: np.array([value(sample) for sample in samples], np.int64) for name, value in _IDS.items()}
    arrays |= {
        "prompt_rows": np.array([row_of[id(sample.prompt)] for sample in samples], np.int64),
        "rewards": np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float64),
        "weight_versions": np.array(spans, np.int64).reshape(-1, 3),
        "prompt_index": np.array([prompt.index for prompt in prompts.values()], np.int64),
        "prompt_lens": np.array([len(prompt.token_ids) for prompt in prompts.values()], np.int64),
        "prompt_ids": _flat([prompt.token_ids for prompt in prompts.values()], np.int32),
    }
    for name, (dtype, part) in _RAGGED.items():
        parts = [part(sample) for sample in samples]
        arrays[name] = _flat([one for one in parts if one is not None], dtype)
        arrays[f"has_{name}"] = np.array([one is not None for one in parts], np.bool_)
    texts = {
        "prompts": [{"text": one.text, "label": one.label, "metadata": _plain(dict(one.metadata))} for one in prompts.values()],
        "responses": [sample.response_text for sample in samples],
    }
    return PackedSamples(arrays, texts)


def unpack_samples(packed: PackedSamples) -> list[Sample]:
    """Raises DataError when an array is missing or does not have the length that others give it."""
    try:
        return list(_unpack(packed.arrays, packed.texts))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"the arrays of samples do not fit together ({type(error).__name__}: {error})") from error


def _unpack(arrays: Mapping[str, np.ndarray], texts: Mapping[str, Any]) -> Iterator[Sample]:
    ids = {name: arrays[name].tolist() for name in (*_IDS, "prompt_rows")}
    prompts = [
        Prompt(index=index, text=one["text"], token_ids=token_ids, label=one["label"], metadata=one["metadata"])
        for index, token_ids, one in zip(
            arrays["prompt_index"].tolist(), _cut(arrays, "prompt_ids", arrays["prompt_lens"]), texts["prompts"], strict=True
        )
    ]
    lens = arrays["response_lens"]
    ragged = {name: _column(arrays, name, lens) for name in _RAGGED if name != "support_ids"}
    support_lens = np.array([0 if counts is None else counts.sum() for counts in ragged["support_counts"]], np.int64)
    ragged["support_ids"] = _column(arrays, "support_ids", support_lens)
    spans = _cut(arrays, "weight_versions", arrays["num_spans"])
    rewards = [None if np.isnan(reward) else reward for reward in arrays["rewards"].tolist()]
    for row, (response, span, reward) in enumerate(zip(texts["responses"], spans, rewards, strict=True)):
        counts, support_ids = ragged["support_counts"][row], ragged["support_ids"][row]
        yield Sample(
            sample_id=ids["sample_ids"][row],
            group_id=ids["group_ids"][row],
            trajectory_id=ids["trajectory_ids"][row],
            prompt=prompts[ids["prompt_rows"][row]],
            response_ids=_needed(ragged["response_ids"][row]),
            response_text=response,
            rollout_log_probs=_needed(ragged["rollout_log_probs"][row]),
            support=None if support_ids is None or counts is None else Support(support_ids, counts),
            loss_mask=_needed(ragged["loss_mask"][row]),
            finish=FINISH_CODES[ids["finish"][row]],
            weight_versions=tuple(VersionSpan(*one) for one in span.tolist()),
            num_cached_tokens=ids["num_cached_tokens"][row],
            full_log_probs=ragged["full_log_probs"][row],
            reward=reward,
            process_rewards=ragged["process_rewards"][row],
            reward_cut=bool(ids["reward_cut"][row]),
        )


def _column(arrays: Mapping[str, np.ndarray], name: str, lens: np.ndarray) -> list[np.ndarray | None]:
    """The part of each sample, None for those that have none."""
    has = arrays[f"has_{name}"]
    parts = iter(_cut(arrays, name, lens[has]))
    return [next(parts) if one else None for one in has.tolist()]


def _cut(arrays: Mapping[str, np.ndarray], name: str, lens: np.ndarray) -> list[np.ndarray]:
    """A flat array cut into pieces of `lens`."""
    if len(arrays[name]) != lens.sum():
        raise ValueError(f"{name} has {len(arrays[name])} entries, expected {lens.sum()}")
    return np.split(arrays[name], np.cumsum(lens)[:-1]) if len(lens) else []


def _needed(part: np.ndarray | None) -> np.ndarray:
    if part is None:
        raise ValueError("a sample has no tokens")
    return part


def _flat(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    pieces: list[np.ndarray] = [np.asarray(part, dtype) for part in parts]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
