"""Folders as files: what may be replaced, and weights files that are not whole."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.config.hf_folder import TensorEntry, check_replaceable, check_weight_files, read_tensor_entries
from slime_ppo.errors import CheckpointError

NORM = {"norm": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def _weights(header: object, num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_check_replaceable_of_nothing_an_empty_folder_or_an_export_passes(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "nowhere")
    check_replaceable(tmp_path)
    for name in ("config.json", "model-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (tmp_path / name).touch()
    check_replaceable(tmp_path)


@pytest.mark.parametrize("name", ["thesis.txt", "model-00001-of-00002.safetensors", "modelling.safetensors", ".git"])
def test_check_replaceable_of_a_folder_with_anything_else_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="is not an earlier export, so it is not replaced") as caught:
        check_replaceable(tmp_path)
    assert f"{tmp_path} holds {name}:" in str(caught.value)


def test_check_replaceable_of_a_folder_or_link_under_a_known_name_refuses(tmp_path: Path) -> None:
    (tmp_path / "a" / "config.json").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    for folder in ("a", "b"):
        with pytest.raises(CheckpointError, match="not an earlier export"):
            check_replaceable(tmp_path / folder)


def test_check_replaceable_of_a_file_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file, expected a folder"):
        check_replaceable(tmp_path / "file")


def test_check_weight_files_that_are_whole_pass(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(_weights(NORM | {"__metadata__": {"format": "pt"}}, 8))
    check_weight_files(tmp_path)
    _index(tmp_path, {"norm": "model.safetensors"})
    check_weight_files(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    _index(tmp_path, {"norm": "one.safetensors"})
    check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"ends inside its header \(0 bytes\)"),
        (b"\x01\x00", r"ends inside its header \(2 bytes\)"),
        (_weights(NORM, 8)[:30], r"ends inside its header \(30 bytes\)"),
        (b"\x01" * 20, "ends inside its header"),
        (_weights(NORM, 7), "has 79 bytes, but its header counts 80"),
        (_weights(NORM, 9), "has 81 bytes, but its header counts 80"),
        (struct.pack("<Q", 4) + b"{]{]", "has no readable safetensors header"),
        (_weights([1], 0), "has no readable safetensors header"),
        (_weights({"norm": {}}, 0), "has no readable safetensors header"),
    ],
)
def test_check_weight_files_with_a_broken_file_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_weight_files(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/model.safetensors ")
    assert "download or convert the model again" in str(caught.value)


def test_check_weight_files_without_weights_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(_weights(NORM, 8))
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds neither model.safetensors nor"):
        check_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is not read: save it again with safetensors"):
        check_weight_files(tmp_path)


def test_check_weight_files_where_a_file_and_an_index_of_others_are_two_models_refuses(tmp_path: Path) -> None:
    """transformers would load the file."""
    for name in ("model", "one"):
        (tmp_path / f"{name}.safetensors").write_bytes(_weights(NORM, 8))
    _index(tmp_path, {"norm": "one.safetensors"})
    for read in (check_weight_files, read_tensor_entries):
        with pytest.raises(CheckpointError, match=r"holds model.safetensors, and a model.safetensors.index.json of other files"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"norm": "one.safetensors", "head": "gone.safetensors"}, "names gone.safetensors, which is not in"),
        ({"norm": "lost.safetensors", "head": "gone.safetensors"}, "names gone.safetensors, lost.safetensors, which are not in"),
        ({"norm": "one.safetensors", "head": "one.safetensors"}, "says that one.safetensors holds head, which it does not"),
        (["norm"], "has no readable weight_map"),
    ],
)
def test_check_weight_files_with_an_index_that_is_wrong_names_it(tmp_path: Path, weight_map: object, message: str) -> None:
    (tmp_path / "one.safetensors").write_bytes(_weights(NORM, 8))
    _index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_weight_files(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/model.safetensors.index.json ")


def test_read_tensor_entries_tells_file_type_and_shape_with_and_without_an_index(tmp_path: Path) -> None:
    norm = TensorEntry("model.safetensors", "F32", (2,), 8)
    (tmp_path / "model.safetensors").write_bytes(_weights(NORM | {"__metadata__": {"format": "pt"}}, 8))
    assert read_tensor_entries(tmp_path) == {"norm": norm}
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    _index(tmp_path, {"norm": "one.safetensors"})
    assert read_tensor_entries(tmp_path) == {"norm": replace(norm, file="one.safetensors")}
    (tmp_path / "one.safetensors").write_bytes(_weights(NORM, 7))
    with pytest.raises(CheckpointError, match="has 79 bytes, but its header counts 80"):
        read_tensor_entries(tmp_path)
