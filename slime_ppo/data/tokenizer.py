"""Text to token ids and back, from a Hugging Face model folder, without torch or transformers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from slime_ppo.errors import CheckpointError, DataError

# stands for bytes that are not (yet) a whole character
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of one model folder.

    `eos_ids` are the tokens that end a response, the first one listed first; `vocab_size` counts the tokenizer's tokens (the
    model may have more rows).
    """

    folder: Path
    eos_ids: tuple[int, ...]
    vocab_size: int
    backend: Tokenizer

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 [tokens], without any token in front or behind that the text does not contain."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in parallel."""
        # the fast one leaves out where in the text each token stands, which takes most of the time and nobody asks
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; special tokens leave no trace."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_strings(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The text each token adds, one string per token, for a viewer.

        Joined they are the decoded text, with special tokens spelled out ("<eos>"). A character spread over several tokens is
        shown at the last of them, and the others are "".
        """
        tokens = [int(i) for i in ids]
        pieces: list[str] = []
        start, end, shown = 0, 0, ""
        for position in range(1, len(tokens) + 1):
            text = self._decode_with_specials(tokens[start:position])
            if text.endswith(_REPLACEMENT) and position < len(tokens):
                pieces.append("")
                continue
            pieces.append(text[len(shown) :])
            # keep the last shown tokens as context: some decoders treat the first token of a text differently
            start, end = end, position
            shown = self._decode_with_specials(tokens[start:end])
        return pieces

    def _decode_with_specials(self, tokens: list[int]) -> str:
        return self.backend.decode(tokens, skip_special_tokens=False)


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """The tokenizer of a local model folder.

    The end-of-sequence ids are those of the first file that names any: generation_config.json, config.json,
    tokenizer_config.json. Raises CheckpointError for a missing folder or file, DataError for a tokenizer that cannot be read,
    names no end of sequence, or names one that it does not have.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"model folder {path} does not exist or is no folder; expected a local Hugging Face folder with tokenizer.json. "
            "Check --hf-checkpoint, and download or convert the model first"
        )
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"model folder {path} has no tokenizer.json. Save the tokenizer in that form: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise DataError(f"{file} is no tokenizer that the tokenizers library can read: {error}") from error
    # a file may carry the settings of somebody's training run; they would cut or pad prompts silently
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(path, _eos_ids(path, backend), backend.get_vocab_size(with_added_tokens=True), backend)


def _eos_ids(folder: Path, backend: Tokenizer) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ids = _listed_ids(read_json(file), file)
        if ids:
            return _checked_ids(ids, file, backend)
    file = folder / "tokenizer_config.json"
    token = _eos_token(read_json(file))
    if token is None:
        raise DataError(
            f"the tokenizer of {folder} has no end-of-sequence token: none of generation_config.json, config.json "
            '("eos_token_id") and tokenizer_config.json ("eos_token") names one. Add "eos_token_id" to generation_config.json'
        )
    found = backend.token_to_id(token)
    if found is None:
        raise DataError(f"{file}: eos_token {token!r} is not in the vocabulary of tokenizer.json. Name a token that is")
    return (found,)


def read_json(file: Path) -> Mapping[str, object]:
    """The object in `file`; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is no valid JSON: {error}. Copy the file again from where the model came from") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, expected a JSON object")
    return content


def _listed_ids(config: Mapping[str, object], file: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise CheckpointError(f"{file}: eos_token_id is {value!r}, expected a token id or a list of token ids")
    return tuple(dict.fromkeys(listed))


def _checked_ids(ids: tuple[int, ...], file: Path, backend: Tokenizer) -> tuple[int, ...]:
    unknown = [i for i in ids if i < 0 or backend.id_to_token(i) is None]
    if unknown:
        raise DataError(
            f"{file}: eos_token_id {unknown[0]} is not in tokenizer.json, which has {backend.get_vocab_size()} tokens. "
            "Do both files come from the same model?"
        )
    return ids


def _eos_token(config: Mapping[str, object]) -> str | None:
    """The token is written as a string, or as an object with its "content"."""
    value = config.get("eos_token")
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
