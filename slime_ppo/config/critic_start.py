"""Where a critic's first weights come from: a Hugging Face folder of a policy, critic or reward model, or torch_dist."""

import json
from dataclasses import dataclass
from pathlib import Path

from slime_ppo.config.hf_folder import read_tensor_entries
from slime_ppo.conversion.torch_dist import HF_FOLDER
from slime_ppo.conversion.torch_dist_folder import find_torch_dist, is_torch_dist
from slime_ppo.errors import CheckpointError

_HEAD = "score.weight"


@dataclass(frozen=True)
class CriticStart:
    """`hf_folder` holds config.json, and the weights where `checkpoint`, the folder of one torch_dist checkpoint, is None."""

    hf_folder: Path
    checkpoint: Path | None

    @staticmethod
    def of(folder: str | Path) -> "CriticStart":
        """What `folder` is; one with several checkpoints stands for the newest of them. Raises CheckpointError when that is not
        there, or brings no config.json."""
        if not is_torch_dist(Path(folder)):
            return CriticStart(Path(folder), None)
        found = find_torch_dist(Path(folder))
        if found.companion is None:
            raise CheckpointError(
                f"{found.weights} is a torch_dist checkpoint without {HF_FOLDER}/config.json, which says what its weights are. "
                "Convert it again, or copy the model's config.json and tokenizer files there"
            )
        return CriticStart(found.companion, found.weights)

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
