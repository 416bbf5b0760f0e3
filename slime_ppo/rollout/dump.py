"""One rollout in one file: its samples, and what training made of it before the first update.

A zip of header.json and plain arrays: no pickle, and `unzip -p FILE header.json` or numpy.load open it. Written beside and
renamed, so that a file that is there is whole. Equal rollouts give equal bytes.
"""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_ppo.config.debug import rollout_file
from slime_ppo.config.roles import RoleName
from slime_ppo.errors import DataError
from slime_ppo.types.rollout_batch import COLUMNS, RolloutBatch
from slime_ppo.types.sample import Sample
from slime_ppo.types.sample_arrays import PackedSamples, pack_samples, unpack_samples
from slime_ppo.types.step_plan import Step, StepPlan

FORMAT = 2
_HEADER = "header.json"
_KIND = "slime_ppo rollout"


@dataclass(frozen=True)
class RolloutHeader:
    """`config` is the resolved YAML of the run, `model` the shape of its actor as JSON values."""

    rollout_id: int
    config: str
    model: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingDump:
    """What the first update of the rollout starts from. `batch` has every column; `learning_rates` by role, one per step of the
    plan, of the roles that train; `kl_coef` is the controller's."""

    batch: RolloutBatch
    plan: StepPlan
    learning_rates: Mapping[RoleName, Sequence[float]]
    kl_coef: float


@dataclass(frozen=True)
class RolloutDump:
    """`training` is None until the columns have been made, and where nothing is trained."""

    header: RolloutHeader
    samples: Sequence[Sample]
    training: TrainingDump | None = None


@dataclass(frozen=True)
class DumpWriter:
    """Keeps the rollouts of one run in the files of `where` (config/debug.py). `config` and `model` as in RolloutHeader."""

    where: str
    config: str
    model: Mapping[str, Any]

    def save(self, rollout_id: int, samples: Sequence[Sample], training: TrainingDump | None = None) -> None:
        """As `write_dump`."""
        header = RolloutHeader(rollout_id, self.config, self.model)
        write_dump(rollout_file(self.where, rollout_id), RolloutDump(header, samples, training))


def write_dump(path: Path, dump: RolloutDump) -> None:
    """Write or replace the file. Raises DataError when it cannot be written; what was there stays then."""
    packed = pack_samples(dump.samples)
    header = {"kind": _KIND, "format": FORMAT, "rollout_id": dump.header.rollout_id, "model": dump.header.model}
    header |= {"config": dump.header.config, "training": None}
    arrays = {f"samples/{name}": array for name, array in packed.arrays.items()}
    if dump.training is not None:
        header["training"], made = _training_members(dump.training, dump.samples)
        arrays |= made
    header["texts"] = packed.texts
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header, indent=1))
                for name, array in arrays.items():
                    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"rollout {dump.header.rollout_id} cannot be written to {path} (--save-debug-rollout-data): {error.strerror}. Make "
            "room, or save elsewhere"
        ) from error


def read_header(path: Path) -> RolloutHeader:
    """Raises DataError for a file that is missing, broken, no rollout, or of another format."""
    with _Opened(path) as archive:
        header = _json_header(path, archive)
    return RolloutHeader(header["rollout_id"], header["config"], header["model"])


def read_dump(path: Path) -> RolloutDump:
    """Raises DataError as `read_header` does, and for arrays that do not fit together."""
    with _Opened(path) as archive:
        header = _json_header(path, archive)
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        arrays = {name: _array(archive, name) for name in names}
        found = RolloutHeader(header["rollout_id"], header["config"], header["model"])
        of_samples = {name.removeprefix("samples/"): array for name, array in arrays.items() if name.startswith("samples/")}
        samples = unpack_samples(PackedSamples(of_samples, header["texts"]))
        made = header["training"]
        training = None if made is None else _training(found.rollout_id, samples, made, arrays)
    return RolloutDump(found, samples, training)


def _training_members(training: TrainingDump, samples: Sequence[Sample]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """JSON values and arrays. Columns that follow from the samples are left out."""
    batch, plan = training.batch, training.plan
    known = RolloutBatch.from_samples(batch.rollout_id, samples)
    columns = {f"columns/{name}": getattr(batch, name) for name in COLUMNS if getattr(known, name) is None}
    steps = plan.steps
    arrays = {
        "plan/pass_index": np.array([step.pass_index for step in steps], np.int64),
        "plan/step_index": np.array([step.step_index for step in steps], np.int64),
        "plan/sizes": np.array([len(step.rows) for step in steps], np.int64),
        "plan/rows": np.concatenate([np.zeros(0, np.int64), *(step.rows for step in steps)]),
    }
    values = {
        "kl_coef": training.kl_coef,
        "learning_rates": {role: list(rates) for role, rates in training.learning_rates.items()},
        "num_dropped": plan.num_dropped,
    }
    return values, arrays | {name: column for name, column in columns.items() if column is not None}


def _training(
    rollout_id: int, samples: Sequence[Sample], values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> TrainingDump:
    columns = {name.removeprefix("columns/"): array for name, array in arrays.items() if name.startswith("columns/")}
    batch = RolloutBatch.from_samples(rollout_id, samples).with_columns(**columns)
    passes, indices, sizes, rows = (arrays[f"plan/{name}"] for name in ("pass_index", "step_index", "sizes", "rows"))
    parts = np.split(rows, np.cumsum(sizes)[:-1]) if len(sizes) else []
    steps = tuple(Step(one, index, part) for one, index, part in zip(passes.tolist(), indices.tolist(), parts, strict=True))
    return TrainingDump(
        batch=batch,
        plan=StepPlan(rollout_id, steps, values["num_dropped"]),
        learning_rates=values["learning_rates"],
        kl_coef=values["kl_coef"],
    )


class _Opened:
    """The archive; whatever is wrong with the file inside the block is a DataError that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive: zipfile.ZipFile | None = None

    def __enter__(self) -> zipfile.ZipFile:
        try:
            self._archive = zipfile.ZipFile(self._path)
        except FileNotFoundError as error:
            raise DataError(f"no rollout file {self._path}: was it saved by --save-debug-rollout-data?") from error
        except (OSError, zipfile.BadZipFile) as error:
            raise self._broken(error) from error
        return self._archive

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._archive is not None:
            self._archive.close()
        if isinstance(error, (OSError, zipfile.BadZipFile, KeyError, ValueError, TypeError)):
            raise self._broken(error) from error
        if isinstance(error, DataError) and str(self._path) not in str(error):
            raise DataError(f"{self._path}: {error}") from error

    def _broken(self, error: Exception) -> DataError:
        return DataError(
            f"{self._path} is no whole rollout file ({type(error).__name__}: {error}). Copy it again, or save the rollout again"
        )


def _json_header(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    if _HEADER not in archive.namelist():
        raise DataError(f"{path} has no {_HEADER}: it is no rollout of --save-debug-rollout-data")
    header: dict[str, Any] = json.loads(archive.read(_HEADER))
    kind, version = header.get("kind"), header.get("format")
    if kind != _KIND or version != FORMAT:
        raise DataError(
            f"{path} is {kind!r} of format {version}, expected {_KIND!r} of format {FORMAT}. Save it again with this version"
        )
    missing = [name for name in ("rollout_id", "config", "model") if name not in header]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)} in its {_HEADER}: it is damaged. Save the rollout again")
    return header


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
    return array
