"""Prompts from a file: read and checked once at the start, then drawn without end in an order that can be resumed."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.data.chat import ChatTemplate
from slime_ppo.data.row import BrokenRow, RawRow
from slime_ppo.data.row_format import PromptRow
from slime_ppo.data.rows import read_rows
from slime_ppo.data.seeding import derive_seed, shuffled
from slime_ppo.data.store import PromptStore
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.errors import DataError
from slime_ppo.types.sample import Prompt

# prompts that are encoded together; a token takes some hundred bytes while it is made
_BLOCK_ROWS, _BLOCK_CHARS = 256, 2**18
# the longest tokens of large vocabularies are runs of 128 spaces; a text of more has more tokens, and is not encoded to count them
_MOST_CHARS_PER_TOKEN = 128


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


class RowReader(Protocol):
    """Makes prompts of rows: RowFormat those of PPO, ExampleFormat examples that hold their response."""

    @property
    def input_key(self) -> str: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    def read(self, row: RawRow) -> PromptRow:
        """Raises BrokenRow for a row that is no prompt."""
        ...


@dataclass(frozen=True)
class RowPolicy:
    """Which rows are prompts, and what happens to the others: "error" ends the run before it begins, the other word leaves them
    out and counts them. A row is broken when it cannot be read or holds no prompt, overlong above `max_prompt_len` tokens.
    """

    max_prompt_len: int
    overlong_prompt: Literal["error", "drop"] = "error"
    broken_row: Literal["error", "skip"] = "error"


class PromptSource:
    """Prompts from a JSON Lines or parquet file, or from some of its rows (`path` as in PromptPath).

    Everything wrong in the file is found here, before any device is used: DataError with file and row for what `policy` does not
    leave out. The file is read once, block by block, and the prompts are kept on disk with their tokens (PromptStore); in memory
    are 16 bytes for each, however long it is. `left_out` tells what was left out, a line for each kind.

    Epoch e is shuffled by (seed, e) alone, or in file order with `shuffle` off. `origin` is the flag that named the file.
    """

    def __init__(
        self,
        path: str,
        tokenizer: TextTokenizer,
        *,
        row_format: RowReader,
        policy: RowPolicy,
        shuffle: bool,
        seed: int,
        origin: str = "--prompt-data",
    ) -> None:
        self._path, self._origin = path, origin
        reading = _Reading(path, tokenizer, row_format, policy, origin)
        self.prompts = reading.stored()
        self.left_out = reading.left_out()
        template = row_format.chat_template
        self._identity: dict[str, object] = {
            "fingerprint": reading.fingerprint.hexdigest(),
            "chat_template": None if template is None else template.digest,
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
        """Epoch and position in it, with a sha256 of the rows and whatever else fixes the order."""
        return self._identity | {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state` was taken.

        Raises DataError when the rows, the chat template, the number of usable prompts, the seed or the shuffle switch is not what
        it was: the saved position would then point into another order.
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


@dataclass
class _Reading:
    """One pass over the file: what came of it so far."""

    path: str
    tokenizer: TextTokenizer
    row_format: RowReader
    policy: RowPolicy
    origin: str
    num_broken: int = 0
    first_broken: str = ""
    num_overlong: int = 0
    first_overlong: str = ""
    num_read: int = 0
    # of every row that holds a prompt, in order, whatever its length
    fingerprint: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def stored(self) -> PromptStore:
        """The prompts of the file. Raises DataError for rows that must not be left out, and when none is left."""
        prompts = PromptStore()
        for block in self._blocks():
            self._append(block, prompts)
        prompts.seal()
        self._check(prompts)
        return prompts

    def _blocks(self) -> Iterator[list[PromptRow]]:
        block: list[PromptRow] = []
        num_chars = 0
        for row in self._readable():
            block.append(row)
            num_chars += len(row.text)
            if len(block) == _BLOCK_ROWS or num_chars > _BLOCK_CHARS:
                yield block
                block, num_chars = [], 0
        yield block

    def left_out(self) -> tuple[str, ...]:
        """What was left out, a line for each kind."""
        lines = []
        if self.num_overlong:
            what = f"{self.num_overlong} prompts of more than {self.policy.max_prompt_len} tokens left out"
            lines.append(f"{self.path}: {what}, the first: {self.first_overlong}")
        if self.num_broken:
            lines.append(f"{self.path}: {self.num_broken} broken rows left out, the first: {self.first_broken}")
        return tuple(lines)

    def _readable(self) -> Iterator[PromptRow]:
        for row in read_rows(PromptPath.parse(self.path), origin=self.origin):
            try:
                yield self.row_format.read(row)
            except BrokenRow as problem:
                self._broken(row.place, str(problem))

    def _append(self, block: list[PromptRow], prompts: PromptStore) -> None:
        limit = self.policy.max_prompt_len
        fits = [len(row.text) <= limit * _MOST_CHARS_PER_TOKEN for row in block]
        encoded = self.tokenizer.encode_batch([row.text if short else "" for row, short in zip(block, fits, strict=True)])
        for row, ids, short in zip(block, encoded, fits, strict=True):
            if short and len(ids) == 0:
                shown = f"{row.text[:60]!r}" + ("..." if row.text[60:] else "")
                self._broken(row.place, f"prompt {shown} has no tokens; a prompt needs at least one. Remove or fill the line")
                continue
            self.num_read += 1
            self.fingerprint.update(row.identity + b"\n")
            if short and len(ids) <= limit:
                prompts.append(Prompt(index=row.index, text=row.text, token_ids=ids, label=row.label, metadata=row.metadata))
            else:
                size = f"{len(ids)} tokens" if short else f"{len(row.text)} characters"
                self.num_overlong += 1
                self.first_overlong = self.first_overlong or f"{row.place}: prompt of {size}"

    def _broken(self, place: str, problem: str) -> None:
        if self.policy.broken_row == "error":
            raise DataError(f"{place}: {problem}")
        self.num_broken += 1
        self.first_broken = self.first_broken or f"{place}: {problem}"

    def _check(self, prompts: PromptStore) -> None:
        limit = self.policy.max_prompt_len
        if self.num_overlong and self.policy.overlong_prompt == "error":
            raise DataError(
                f"{self.first_overlong}, the limit is {limit} (--rollout-max-prompt-len); {self.num_overlong} of {self.num_read} "
                "prompts are longer. Raise the limit, shorten them, or leave them out with --overlong-prompt drop"
            )
        if len(prompts):
            return
        if self.num_overlong:
            raise DataError(
                f"{self.path}: all {self.num_overlong} prompts are longer than {limit} tokens (--rollout-max-prompt-len) and were "
                "dropped (--overlong-prompt drop); nothing is left. Raise the limit"
            )
        if self.num_broken:
            raise DataError(
                f"{self.path}: all {self.num_broken} rows are broken and were left out (--broken-row skip); nothing is left. The "
                f"first: {self.first_broken}"
            )
        if PromptPath.parse(self.path).file != self.path:
            raise DataError(f"{self.path} ({self.origin}) names no row: the slice is empty, or the file has fewer rows")
        raise DataError(
            f"{self.path} ({self.origin}) is empty; expected one JSON object per line, as in "
            f'{{"{self.row_format.input_key}": "..."}}'
        )
