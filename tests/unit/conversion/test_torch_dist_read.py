"""The one reader of torch_dist folders: regions in place, by the chunks that were written, and everything that is wrong at once."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_ppo.conversion.torch_dist_read import Region, TorchDistReader
from slime_ppo.conversion.torch_dist_write import Chunk, packed, write_file, write_metadata
from slime_ppo.errors import CheckpointError

WHOLE = torch.arange(24.0).view(6, 4)


def _chunk(key: str, rows: slice, columns: slice = slice(0, 4)) -> Chunk:
    part = WHOLE[rows, columns]
    return Chunk(key, (6, 4), (rows.start, columns.start), tuple(part.shape), part.dtype, lambda: part)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`a` in three chunks of two files, `b` in one of a third, and an object beside it."""
    first = write_file(tmp_path / "__0_0.distcp", {}, [_chunk("a", slice(0, 2)), _chunk("a", slice(2, 6), slice(0, 1))])
    second = write_file(tmp_path / "__1_0.distcp", {}, [_chunk("a", slice(2, 6), slice(1, 4))])
    third = write_file(tmp_path / "__2_0.distcp", {"note": packed("hello")}, [_chunk("b", slice(0, 6))])
    write_metadata(tmp_path, [first, second, third])
    return tmp_path


def _edit(folder: Path, edit: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_regions_are_filled_in_place_and_each_chunk_is_read_once_in_the_order_of_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets are views of larger tensors and one is of another type; three regions share chunks."""
    load, loaded = torch.load, []

    def noted(file: Any, **options: Any) -> Any:
        found = load(file, **options)
        loaded.append(tuple(found.shape))
        return found

    assert torch.load(io.BytesIO(TorchDistReader(folder).read_object("note"))) == ["hello"]

    reader, room = TorchDistReader(folder), torch.full((3, 8, 8), -1.0)
    regions = [Region("a", (1, 1), (3, 3)), Region("a", (0, 0), (6, 4)), Region("b", (5, 2), (1, 2))]
    targets = [room[0, 1:4, 1:4], room[1, :6, :4], torch.zeros(1, 2, dtype=torch.bfloat16)]
    monkeypatch.setattr(torch, "load", noted)
    reader.fill(reader.plan(regions), targets)
    assert torch.equal(targets[0], WHOLE[1:4, 1:4]) and torch.equal(targets[1], WHOLE)
    assert targets[2].tolist() == WHOLE[5:6, 2:].tolist()
    assert (room == -1).sum() == 3 * 64 - 9 - 24
    assert loaded == [(2, 4), (4, 1), (4, 3), (6, 4)]
    assert torch.equal(reader.read_whole("a"), WHOLE)


def test_everything_that_is_wrong_is_one_message(folder: Path) -> None:
    def lose(metadata: Any) -> None:
        (chunk,) = [index for index in metadata.storage_data if index.fqn == "a" and tuple(index.offset) == (0, 0)]
        (note,) = [index for index in metadata.storage_data if index.fqn == "note"]
        del metadata.storage_data[chunk], metadata.storage_data[note]

    _edit(folder, lose)
    (folder / "__1_0.distcp").unlink()
    size = (folder / "__2_0.distcp").stat().st_size
    os.truncate(folder / "__2_0.distcp", size - 1)
    reader = TorchDistReader(folder)
    of_files = f"__1_0.distcp: No such file or directory; __2_0.distcp has {size - 1:,} bytes, expected {size:,} or more"
    again = ". It is not as it was written: copy it again, or use an earlier checkpoint"
    with pytest.raises(CheckpointError) as of_tool:
        reader.check_whole()
    hole = "a: the index knows where 16 of 24 numbers lie"
    assert str(of_tool.value) == f"{folder}: {of_files}; {hole}; note: the index does not say where it lies{again}"
    with pytest.raises(CheckpointError) as of_rank:
        reader.plan([Region("a", (1, 0), (5, 4)), Region("b", (0, 0), (6, 4))])
    assert str(of_rank.value) == f"{folder}: {of_files}; a: the index knows where 16 of 20 numbers lie{again}"
    with pytest.raises(CheckpointError, match="holds no object note"):
        reader.read_object("note")


def test_a_rank_looks_at_the_files_it_needs_and_a_tool_at_all(folder: Path) -> None:
    (folder / "__2_0.distcp").unlink()
    reader, target = TorchDistReader(folder), torch.zeros(6, 4)
    reader.fill(reader.plan([Region("a", (0, 0), (6, 4))]), [target])
    assert torch.equal(target, WHOLE)
    for ask in (reader.check_whole, lambda: reader.read_whole("b"), lambda: reader.read_object("note")):
        with pytest.raises(CheckpointError, match=r"__2_0\.distcp: No such file"):
            ask()


def test_numbers_that_are_there_twice_are_refused(folder: Path) -> None:
    """An index of which nobody can say which of the two counts."""
    _edit(folder, lambda metadata: metadata.state_dict_metadata["b"].chunks.append(metadata.state_dict_metadata["b"].chunks[0]))
    reader = TorchDistReader(folder)
    for ask in (reader.check_whole, lambda: reader.read_whole("b")):
        with pytest.raises(CheckpointError, match="b: the index knows where 48 of 24 numbers lie"):
            ask()


@pytest.mark.parametrize("held", [torch.zeros(6, 5), {"b": 1}, None])
def test_chunk_that_is_not_what_the_index_says_is_refused_by_file_and_name(folder: Path, held: object) -> None:
    data = folder / "__2_0.distcp"
    with data.open("wb") as file:
        if held is not None:
            torch.save(held, file)
    length, size = data.stat().st_size, 4096
    os.truncate(data, size)

    def point(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "b":
                info.offset, info.length = 0, length or size

    _edit(folder, point)
    words = r"is \[6, 5\] there, the index says \[6, 4\]" if isinstance(held, torch.Tensor) else "cannot be read"
    with pytest.raises(CheckpointError, match=rf"{folder}/__2_0\.distcp: b {words}.*\. It is not as it was written"):
        TorchDistReader(folder).read_whole("b")


@pytest.mark.parametrize("content", [b"", b"\x80\x04", pickle.dumps({"a": 1}), pickle.dumps(None), b"cposix\nnothing\n."])
def test_index_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"no torch_dist checkpoint: it has no \.metadata"):
        TorchDistReader(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        TorchDistReader(tmp_path)
