"""Samples in a file: collected and rewarded, to be trained on after a resume without generating them again."""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_ppo.errors import CheckpointError
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, VersionSpan

_RECORDS = "records"


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write an uncompressed .npz that holds no pickles: one flat array per per-token field, and a JSON record per sample with the
    lengths of its parts."""
    arrays = [_arrays(sample) for sample in samples]
    records = [
        _record(sample) | {"lengths": {name: len(array) for name, array in own.items()}}
        for sample, own in zip(samples, arrays, strict=True)
    ]
    names = dict.fromkeys(name for own in arrays for name in own)
    flat = {name: np.concatenate([own[name] for own in arrays if name in own]) for name in names}
    flat[_RECORDS] = np.frombuffer(json.dumps(records).encode("utf-8"), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **flat)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def read_samples(path: Path) -> tuple[Sample, ...]:
    """The samples of `write_samples`, bit for bit. Raises CheckpointError naming a file that is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            flat = {name: file[name] for name in file.files}
        records: list[dict[str, Any]] = json.loads(flat.pop(_RECORDS).tobytes())
        return tuple(_samples(records, flat))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"the samples in {path} cannot be read ({type(error).__name__}: {error})") from error


def _arrays(sample: Sample) -> dict[str, np.ndarray]:
    given = {
        "prompt_ids": sample.prompt.token_ids,
        "response_ids": sample.response_ids,
        "rollout_log_probs": sample.rollout_log_probs,
        "loss_mask": sample.loss_mask,
        "support_ids": None if sample.support is None else sample.support.ids,
        "support_counts": None if sample.support is None else sample.support.counts,
        "full_log_probs": sample.full_log_probs,
        "process_rewards": sample.process_rewards,
    }
    return {name: array for name, array in given.items() if array is not None}


def _record(sample: Sample) -> dict[str, object]:
    prompt = sample.prompt
    return {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "trajectory_id": sample.trajectory_id,
        "prompt": {"index": prompt.index, "text": prompt.text, "label": prompt.label, "metadata": dict(prompt.metadata)},
        "response_text": sample.response_text,
        "finish": sample.finish.value,
        "weight_versions": [(span.version, span.start, span.end) for span in sample.weight_versions],
        "num_cached_tokens": sample.num_cached_tokens,
        "reward": sample.reward,
    }


def _samples(records: Sequence[Mapping[str, Any]], flat: Mapping[str, np.ndarray]) -> list[Sample]:
    at = dict.fromkeys(flat, 0)
    samples = []
    for record in records:
        own: dict[str, np.ndarray] = {}
        for name, length in record["lengths"].items():
            own[name] = flat[name][at[name] : at[name] + length]
            at[name] += length
        prompt = Prompt(token_ids=own["prompt_ids"], **record["prompt"])
        samples.append(
            Sample(
                sample_id=record["sample_id"],
                group_id=record["group_id"],
                trajectory_id=record["trajectory_id"],
                prompt=prompt,
                response_ids=own["response_ids"],
                response_text=record["response_text"],
                rollout_log_probs=own["rollout_log_probs"],
                support=Support(own["support_ids"], own["support_counts"]) if "support_ids" in own else None,
                loss_mask=own["loss_mask"],
                finish=FinishReason(record["finish"]),
                weight_versions=tuple(VersionSpan(*span) for span in record["weight_versions"]),
                num_cached_tokens=record["num_cached_tokens"],
                full_log_probs=own.get("full_log_probs"),
                reward=record["reward"],
                process_rewards=own.get("process_rewards"),
            )
        )
    return samples
