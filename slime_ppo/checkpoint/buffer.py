"""Samples in a file: collected and rewarded, to be trained on after a resume without generating them again."""

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime_ppo.errors import CheckpointError, DataError
from slime_ppo.types.sample import Sample
from slime_ppo.types.sample_arrays import PackedSamples, pack_samples, unpack_samples

_TEXTS = "texts"


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write and flush an uncompressed .npz without pickles."""
    packed = pack_samples(samples)
    arrays = {**packed.arrays, _TEXTS: np.frombuffer(json.dumps(packed.texts).encode("utf-8"), np.uint8)}
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def read_samples(path: Path) -> tuple[Sample, ...]:
    """The samples of `write_samples`, bit for bit. Raises CheckpointError naming a file that is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        texts = json.loads(arrays.pop(_TEXTS).tobytes())
        return tuple(unpack_samples(PackedSamples(arrays, texts)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, DataError) as error:
        raise CheckpointError(f"the samples in {path} cannot be read ({type(error).__name__}: {error})") from error
