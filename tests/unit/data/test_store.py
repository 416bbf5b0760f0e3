import errno
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.data import store
from slime_ppo.data.store import PromptStore
from slime_ppo.errors import DataError
from slime_ppo.types.sample import Prompt

PROMPTS = [
    Prompt(3, "né €🙂\u2028", np.array([1, 2**30], np.int32), "72", {"a": [1, {"b": None}], "é": "\ud800", "nan": 0.5}),
    Prompt(4, "", np.array([7], np.int32)),
    Prompt(9, "x" * 1000, np.arange(500, dtype=np.int32), None, {}),
]


def filled() -> PromptStore:
    kept = PromptStore()
    for prompt in PROMPTS:
        kept.append(prompt)
    kept.seal()
    return kept


def same(one: Prompt, other: Prompt) -> bool:
    plain = (one.index, one.text, one.label, one.metadata) == (other.index, other.text, other.label, other.metadata)
    return plain and one.token_ids.dtype == np.int32 and one.token_ids.tolist() == other.token_ids.tolist()


def test_store_gives_back_what_it_was_given_in_any_order() -> None:
    kept = filled()
    assert len(kept) == 3
    for place in (2, 0, 1, -1, np.int64(0)):
        assert same(kept[place], PROMPTS[place])
    assert [same(one, other) for one, other in zip(kept[1:], PROMPTS[1:], strict=True)] == [True, True]
    assert [prompt.index for prompt in kept] == [3, 4, 9]
    with pytest.raises(IndexError):
        kept[3]


def test_store_token_ids_can_be_written_to() -> None:
    ids = filled()[0].token_ids
    ids += 1
    assert ids.tolist() == [2, 2**30 + 1]


def test_store_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    kept = filled()
    assert list(tmp_path.iterdir()) == []
    assert kept[1].index == 4


def test_store_on_a_full_disk_names_the_folder_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def write(self, content: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = write

    kept = PromptStore()
    monkeypatch.setattr(kept, "_file", FullDisk())
    with pytest.raises(DataError, match="cannot be written after 0 bytes: No space left on device. Make room .* or set TMPDIR"):
        kept.append(PROMPTS[0])
