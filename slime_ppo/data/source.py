"""Prompts from a JSONL file: read and checked once at the start, then drawn without end in an order that can be resumed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from slime_ppo.data.seeding import derive_seed, shuffled
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.errors import DataError
from slime_ppo.types.sample import Prompt


class DataSource(Protocol):
    """An endless stream of prompts whose place can be saved and restored."""

    def next_prompts(self, n: int) -> list[Prompt]:
        """The next `n` prompts; a new epoch begins where one ends, also in the middle of a draw."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Everything `load_state_dict` needs to go on from here; plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state` was taken. Raises DataError when it belongs to other data."""
        ...

    def __len__(self) -> int:
        """Prompts in one epoch."""
        ...


class JsonlDataSource:
    """Prompts from a JSONL file, one object per line.

    `input_key` holds the prompt, `label_key` the label for the reward function; all other keys become the prompt's metadata.
    Everything wrong in the file is found here, before any device is used: DataError with file and line for a broken or blank
    line, a missing key, a value that is no string, a prompt of zero tokens, and a prompt of more than `max_prompt_len`
    tokens unless `overlong_prompt` is "drop", which leaves those out and counts them in `num_dropped`.

    Epoch e is shuffled by (seed, e) alone, or in file order with `shuffle` off. `origin` is the flag that named the file.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: TextTokenizer,
        *,
        input_key: str,
        label_key: str | None,
        max_prompt_len: int,
        overlong_prompt: Literal["error", "drop"],
        shuffle: bool,
        seed: int,
        origin: str = "--prompt-data",
    ) -> None:
        self._path = Path(path)
        self._origin = origin
        content = _read_bytes(self._path, origin)
        rows = [
            _parse_row(line, _Place(self._path, number), input_key, label_key) for number, line in enumerate(_lines(content), 1)
        ]
        if not rows:
            raise DataError(f'{self._path} ({origin}) is empty; expected one JSON object per line, as in {{"{input_key}": "..."}}')
        prompts = _tokenize(rows, tokenizer)
        self.prompts = _fitting(prompts, self._path, max_prompt_len, overlong_prompt)
        self.num_dropped = len(prompts) - len(self.prompts)
        self._identity: dict[str, object] = {
            "fingerprint": sha256(content).hexdigest(),
            "num_prompts": len(self.prompts),
            "shuffle": shuffle,
            "seed": seed,
        }
        self._shuffle, self._seed = shuffle, seed
        self._start_epoch(0, 0)

    def __len__(self) -> int:
        return len(self.prompts)

    def next_prompts(self, n: int) -> list[Prompt]:
        """See DataSource."""
        drawn: list[Prompt] = []
        while len(drawn) < n:
            if self._position == len(self.prompts):
                self._start_epoch(self._epoch + 1, 0)
            rows = self._order[self._position : self._position + n - len(drawn)]
            drawn += [self.prompts[row] for row in rows]
            self._position += len(rows)
        return drawn

    def state_dict(self) -> dict[str, object]:
        """Epoch and position in it, with the sha256 of the file and whatever else fixes the order."""
        return self._identity | {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state` was taken.

        Raises DataError when the file, the number of usable prompts, the seed or the shuffle switch is not what it was: the
        saved position would then point into another order.
        """
        expected = [*self._identity, "epoch", "position"]
        if sorted(state) != sorted(expected):
            raise DataError(
                f"saved data state has the keys {sorted(state)}, expected {sorted(expected)}: not a state of this source"
            )
        for key, value in self._identity.items():
            if state[key] != value:
                raise DataError(
                    f"the saved data position does not fit {self._path} ({self._origin}): {key} was {state[key]!r} when it was "
                    f"saved and is {value!r} now. Resume with the file and the settings the run was started with"
                )
        epoch, position = state["epoch"], state["position"]
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or not 0 <= position <= len(self.prompts):
            raise DataError(f"saved data state has epoch {epoch!r}, position {position!r}; {self._path} has {len(self)} prompts")
        self._start_epoch(epoch, position)

    def _start_epoch(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        n = len(self.prompts)
        self._order = shuffled(n, seed=derive_seed(self._seed, epoch, 0, 0, "prompt_order")) if self._shuffle else np.arange(n)


@dataclass(frozen=True)
class _Place:
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class _Row:
    place: _Place
    text: str
    label: str | None
    metadata: Mapping[str, object]


def _read_bytes(path: Path, origin: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"prompt file {path} ({origin}) cannot be read: {error.strerror}. Expected a JSONL file; relative paths start at "
            "the folder the command runs in"
        ) from error


def _lines(content: bytes) -> list[bytes]:
    """Split at newlines only: a JSON string may hold other characters that `splitlines` takes for line ends."""
    lines = content.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def _parse_row(line: bytes, place: _Place, input_key: str, label_key: str | None) -> _Row:
    if not line.strip():
        raise DataError(f"{place}: blank line; expected one JSON object per line. Remove the line")
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1} of the line). Save the file as UTF-8") from error
    except ValueError as error:
        raise DataError(f"{place}: broken line, {error}; found {line[:60]!r}. Expected one JSON object per line") from error
    if not isinstance(content, dict):
        raise DataError(f"{place}: found a JSON {type(content).__name__}, expected an object with the key {input_key!r}")
    text = _string(content, input_key, place, "--input-key")
    label = None if label_key is None else _string(content, label_key, place, "--label-key")
    metadata = {key: value for key, value in content.items() if key not in (input_key, label_key)}
    return _Row(place, text, label, metadata)


def _string(content: Mapping[str, object], key: str, place: _Place, flag: str) -> str:
    if key not in content:
        raise DataError(f"{place}: no key {key!r} ({flag}); the line has {sorted(content)}. Fix the line or the flag")
    value = content[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} ({flag}) is {value!r}, a {type(value).__name__}; expected a string")
    return value


def _tokenize(rows: list[_Row], tokenizer: TextTokenizer) -> list[Prompt]:
    prompts = []
    for index, (row, ids) in enumerate(zip(rows, tokenizer.encode_batch([row.text for row in rows]), strict=True)):
        if len(ids) == 0:
            raise DataError(f"{row.place}: prompt {row.text!r} has no tokens; a prompt needs at least one. Remove or fill the line")
        prompts.append(Prompt(index=index, text=row.text, token_ids=ids, label=row.label, metadata=row.metadata))
    return prompts


def _fitting(prompts: list[Prompt], path: Path, max_prompt_len: int, policy: Literal["error", "drop"]) -> tuple[Prompt, ...]:
    fitting = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_len)
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > max_prompt_len]
    if overlong and policy == "error":
        first = overlong[0]
        raise DataError(
            f"{path}:{first.index + 1}: prompt of {len(first.token_ids)} tokens, the limit is {max_prompt_len} "
            f"(--rollout-max-prompt-len); {len(overlong)} of {len(prompts)} prompts are longer. Raise the limit, shorten them, "
            "or leave them out with --overlong-prompt drop"
        )
    if not fitting:
        raise DataError(
            f"{path}: all {len(prompts)} prompts are longer than {max_prompt_len} tokens (--rollout-max-prompt-len) and were "
            "dropped (--overlong-prompt drop); nothing is left. Raise the limit"
        )
    return fitting
