"""Reading and writing Hugging Face folders: several files, errors that name the file, publication by one rename."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_ppo.conversion.hf_io import HfWeights, HfWriter
from slime_ppo.errors import CheckpointError
from tests.helpers.tiny_llama import make_tiny_llama


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_weights_single_file_maps_names_to_tensors(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    weights, expected = HfWeights(folder), load_file(folder / "model.safetensors")
    assert len(weights) == len(expected) and set(weights) == set(expected)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert "model.norm.weight" in weights and "nothing" not in weights


def test_weights_index_of_several_files_finds_each_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    _write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    weights = HfWeights(tmp_path)
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {"a": [1, 1], "b": [0, 0, 0], "c": [1]}


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "holds neither model.safetensors nor model.safetensors.index.json"),
        (lambda folder: _write_index(folder, {"a": "gone.safetensors"}), "names gone.safetensors, which is not in"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "no readable weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "no readable weight_map"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x01" * 20), "cannot be read"),
    ],
)
def test_weights_unusable_folder_is_a_checkpoint_error_naming_it(tmp_path: Path, prepare: object, message: str) -> None:
    prepare(tmp_path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message) as caught:
        HfWeights(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_weights_unknown_tensor_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head\.weight"):
        HfWeights(make_tiny_llama(tmp_path, tie=True))["lm_head.weight"]


def _writer(tmp_path: Path, **changes: object) -> HfWriter:
    source = make_tiny_llama(tmp_path / "source")
    return HfWriter(tmp_path / "target", source_folder=source, config_changes=changes)


@pytest.mark.parametrize("num_files", [1, 3])
def test_writer_any_number_of_files_reads_back(tmp_path: Path, num_files: int) -> None:
    writer = _writer(tmp_path, num_labels=1)
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(num_files)}
    for name, tensor in tensors.items():
        writer.write({name: tensor})
    writer.publish()
    weights = HfWeights(tmp_path / "target")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {n: t.tolist() for n, t in tensors.items()}
    assert (tmp_path / "target" / "model.safetensors").exists() == (num_files == 1)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["num_labels"] == 1 and config["model_type"] == "llama"
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == (tmp_path / "source" / "tokenizer.json").read_bytes()
    if num_files > 1:
        index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in tensors.values())


def test_writer_existing_folder_stays_whole_until_publication(tmp_path: Path) -> None:
    first = _writer(tmp_path)
    first.write({"a": torch.ones(1)})
    first.publish()
    second = _writer(tmp_path)
    second.write({"b": torch.ones(1)})
    assert list(HfWeights(tmp_path / "target")) == ["a"]
    second.publish()
    assert list(HfWeights(tmp_path / "target")) == ["b"]
    assert not (tmp_path / "target.partial").exists()


def test_writer_leftovers_of_a_killed_run_do_not_get_in(tmp_path: Path) -> None:
    killed = _writer(tmp_path)
    killed.write({"old": torch.ones(1)})
    killed.write({"older": torch.ones(1)})
    writer = _writer(tmp_path)
    writer.write({"new": torch.ones(1)})
    writer.publish()
    assert list(HfWeights(tmp_path / "target")) == ["new"]
    assert not list((tmp_path / "target").glob("model-*"))


def _notes(folder: Path) -> Path:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work", encoding="utf-8")
    return folder / "thesis.txt"


@pytest.mark.parametrize("name", ["target", "target.partial", "target.old"])
def test_writer_folder_of_someone_else_is_refused_and_not_deleted(tmp_path: Path, name: str) -> None:
    notes = _notes(tmp_path / name)
    with pytest.raises(CheckpointError, match="holds thesis.txt: it is not an earlier export"):
        _writer(tmp_path)
    assert notes.read_text(encoding="utf-8") == "years of work"


def test_writer_folder_filled_while_it_writes_is_refused_at_publication(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.write({"a": torch.ones(1)})
    notes = _notes(tmp_path / "target")
    with pytest.raises(CheckpointError, match="not an earlier export"):
        writer.publish()
    assert notes.exists() and (tmp_path / "target.partial" / "model.safetensors").exists()


def test_writer_empty_folder_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "target").symlink_to(tmp_path / "real")
    writer = _writer(tmp_path)
    writer.write({"a": torch.ones(1)})
    writer.publish()
    assert (tmp_path / "target").is_symlink()
    assert list(HfWeights(tmp_path / "real")) == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["real", "source", "target"]


def test_writer_replaced_folder_left_by_a_killed_run_is_removed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        writer = _writer(tmp_path)
        writer.write({name: torch.ones(1)})
        if name == "b":
            (tmp_path / "target.old").mkdir()
            (tmp_path / "target.old" / "config.json").touch()
        writer.publish()
    assert list(HfWeights(tmp_path / "target")) == ["b"]
    assert not (tmp_path / "target.old").exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"\x01" * 20)])
def test_weights_file_that_is_lost_or_cut_meanwhile_is_a_checkpoint_error_naming_it(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    weights = HfWeights(make_tiny_llama(tmp_path))
    damage(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight cannot be read from {tmp_path}/model\.safetensors"):
        weights["model.norm.weight"]
