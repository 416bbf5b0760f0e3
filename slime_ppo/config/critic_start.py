"""Where a critic's first weights come from: a Hugging Face folder of a policy, critic or reward model, or torch_dist."""

import json
from dataclasses import dataclass
from pathlib import Path

from slime_ppo.config.hf_folder import read_tensor_entries
from slime_ppo.errors import CheckpointError

_HEAD = "score.weight"
_LATEST_FILE = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class CriticStart:
    """`hf_folder` holds config.json, and the weights where `checkpoint`, the folder of one torch_dist checkpoint, is None."""

    hf_folder: Path
    checkpoint: Path | None

    @staticmethod
    def of(folder: str | Path) -> "CriticStart":
        """What `folder` is; one with several checkpoints stands for the newest of them. Raises CheckpointError when that is not
        there, or brings no config.json."""
        checkpoint = _checkpoint_in(Path(folder))
        if checkpoint is None:
            return CriticStart(Path(folder), None)
        companions = checkpoint / "hf"
        if not (companions / "config.json").is_file():
            raise CheckpointError(
                f"{checkpoint} is a torch_dist checkpoint without hf/config.json, which says what its weights are. Convert it "
                "again, or copy the model's config.json and tokenizer files there"
            )
        return CriticStart(companions, checkpoint)

    def holds_head(self) -> bool:
        """True when a value head comes with the weights. Headers and config.json only are read.

        Raises CheckpointError for one that gives several numbers.
        """
        if self.checkpoint is not None:
            config = json.loads((self.hf_folder / "config.json").read_text(encoding="utf-8"))
            return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())
        entries = read_tensor_entries(self.hf_folder)
        if _HEAD in entries and entries[_HEAD].shape[0] != 1:
            raise CheckpointError(
                f"{self.hf_folder} scores {entries[_HEAD].shape[0]} labels ({_HEAD}), expected one: a value is one number. Give a "
                "model with num_labels 1"
            )
        return _HEAD in entries


def _checkpoint_in(folder: Path) -> Path | None:
    if (folder / ".metadata").is_file():
        return folder
    latest = folder / _LATEST_FILE
    if not latest.is_file():
        return None
    number = latest.read_text(encoding="utf-8").strip()
    checkpoint = folder / (f"iter_{int(number):07d}" if number.isdigit() else number)
    if not (checkpoint / ".metadata").is_file():
        raise CheckpointError(f"{latest} names {number}, but {checkpoint} holds no torch_dist checkpoint. Give the folder of one")
    return checkpoint
