"""The seam between a trainer that has weights and an engine that needs them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from slime_ppo.errors import WeightSyncError
from slime_ppo.weight_sync.bucket import TensorSpec


class WeightSync(Protocol):
    """All or nothing per version: after a push that raised, the engine has no valid version and refuses to generate.

    The named tensors come from the trainer the implementation is made for; names are Hugging Face names.
    """

    def connect(self) -> None:
        """Compare the trainer's manifest with what the engine expects, once, before the first push."""
        ...

    def push(self, version: int) -> int:
        """Send the trainer's weights as `version` (0 or more) and return the version the engine reports afterwards."""
        ...

    def close(self) -> None:
        """Free what the connection holds; the engine keeps its weights."""
        ...


def check_manifest(specs: Sequence[TensorSpec], expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Compare a manifest with the engine's parameters: name -> (shape, dtype).

    Raises one WeightSyncError that lists every missing, unexpected, doubled and mis-shaped name.
    """
    problems: list[str] = []
    seen: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in seen:
            problems.append(f"twice: {spec.name}")
        seen[spec.name] = spec
    problems += [f"missing: {name}" for name in expected if name not in seen]
    problems += [f"unexpected: {name}" for name in seen if name not in expected]
    for name, (shape, dtype) in expected.items():
        if name in seen and (seen[name].shape, seen[name].dtype) != (shape, dtype):
            found = seen[name]
            problems.append(f"{name} is {found.dtype} {list(found.shape)}, the engine expects {dtype} {list(shape)}")
    if problems:
        raise WeightSyncError(
            f"the trainer's {len(specs)} tensors do not fit the engine's {len(expected)} parameters; both must come from the same "
            "model folder (--hf-checkpoint):\n  " + "\n  ".join(problems)
        )
