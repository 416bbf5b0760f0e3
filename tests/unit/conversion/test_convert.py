"""Both converters on folders: bit-equal round trips, complete lists of what is wrong, and outputs that are whole or not there."""

import errno
import io
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_ppo.checkpoint.files import file_sizes
from slime_ppo.conversion.convert import plan_hf, plan_torch_dist, write_hf_folder, write_torch_dist_folder
from slime_ppo.conversion.families import FAMILIES
from slime_ppo.conversion.hf_io import HfWeights
from slime_ppo.conversion.torch_dist_folder import find_torch_dist
from slime_ppo.conversion.torch_dist_read import TorchDistReader
from slime_ppo.errors import CheckpointError, ConversionError
from tests.helpers.tiny_family import make_tiny_family
from tests.helpers.tiny_llama import make_tiny_llama
from tests.helpers.tiny_reward_model import make_reward_model

WEIGHTS = "model.safetensors"
LAYER = "model.layers.1."


def _to_torch_dist(source: Path, out: Path, dtype: torch.dtype | None = None, rows: int = 1) -> Path:
    plan = plan_torch_dist(source, dtype=dtype, make_vocab_size_divisible_by=rows)
    done: list[int] = []
    write_torch_dist_folder(plan, out, done.append)
    assert sum(done) == plan.num_bytes
    return out


def _to_hf(
    source: Path, out: Path, dtype: torch.dtype | None = None, companion: Path | None = None, max_file_bytes: int = 10**9
) -> Path:
    plan = plan_hf(source, companion=companion, dtype=dtype, max_file_bytes=max_file_bytes)
    done: list[int] = []
    write_hf_folder(plan, out, done.append)
    assert sum(done) == plan.num_bytes
    return out


def _change(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    tensors = load_file(folder / WEIGHTS) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    kept = {name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _unequal(found: Path, expected: Path) -> list[str]:
    ours, theirs = HfWeights(found), HfWeights(expected)
    assert set(ours) == set(theirs)
    return [name for name in ours if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize(("tie", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_round_trip_of_actor_and_critic_is_bit_equal(tmp_path: Path, *, family: str, tie: bool, dtype: torch.dtype) -> None:
    policy = make_tiny_family(tmp_path / "policy", family, tie=tie, seed=1)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(policy / WEIGHTS).items() if not (tie and "lm_head" in name)}
    save_file(tensors, policy / WEIGHTS, metadata={"format": "pt"})
    for folder in (policy, make_reward_model(policy, tmp_path / "critic", seed=2)):
        middle = _to_torch_dist(folder, tmp_path / f"{folder.name}-torch-dist", rows=64)
        back = _to_hf(middle, tmp_path / f"{folder.name}-back", dtype, max_file_bytes=100_000)
        assert _unequal(back, folder) == []
        reader = TorchDistReader(middle / "iter_0000000")
        assert reader.tensors["embedding.word_embeddings.weight"].size == torch.Size([128, 64])
        if folder is not policy:  # as in training, whatever the rest is
            assert reader.dtype("output_layer.weight") == torch.float32


def test_torch_dist_folder_holds_zeros_as_padding_and_gate_over_up(tmp_path: Path) -> None:
    """The numbers themselves, without the product's way back."""
    folder = make_tiny_llama(tmp_path / "hf", tie=False)
    reader = TorchDistReader(_to_torch_dist(folder, tmp_path / "out", rows=64) / "iter_0000000")
    hf = load_file(folder / WEIGHTS)
    embedding = reader.read_whole("embedding.word_embeddings.weight")
    assert torch.equal(embedding[:100], hf["model.embed_tokens.weight"]) and not embedding[100:].any()
    halves = torch.cat([hf[f"{LAYER}mlp.{half}_proj.weight"] for half in ("gate", "up")])
    assert torch.equal(reader.read_whole("decoder.layers.1.mlp.linear_fc1.weight"), halves)


def test_tensors_that_lie_in_one_parameter_can_be_read_in_any_order(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf")
    plan = plan_hf(_to_torch_dist(folder, tmp_path / "out"), companion=None, dtype=None, max_file_bytes=10**9)
    names = [f"model.layers.{layer}.self_attn.{one}_proj.weight" for one in "vqk" for layer in (1, 0)]
    expected = load_file(folder / WEIGHTS)
    assert [name for name in names if not torch.equal(plan.weights[name], expected[name])] == []


def test_a_tied_output_layer_that_is_stored_again_is_not_written_and_must_be_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf", tie=True)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    again = _to_torch_dist(_change(folder, {"lm_head.weight": embedding.clone()}), tmp_path / "out")
    assert "lm_head.weight" not in HfWeights(_to_hf(again, tmp_path / "back"))
    with pytest.raises(ConversionError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        _to_torch_dist(_change(folder, {"lm_head.weight": embedding + 1}), tmp_path / "other")


def test_dtype_is_chosen_on_both_ways_and_written_to_the_config(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf")
    rounded = _to_torch_dist(folder, tmp_path / "bf16", torch.bfloat16)
    back = _to_hf(rounded, tmp_path / "back")
    expected = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    found = load_file(back / WEIGHTS)
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    wide = _to_hf(rounded, tmp_path / "wide", torch.float32)
    assert torch.equal(load_file(wide / WEIGHTS)["model.norm.weight"], expected["model.norm.weight"].float())


def test_config_and_tokenizer_come_along_and_a_critic_is_a_classifier(tmp_path: Path) -> None:
    policy = make_tiny_llama(tmp_path / "hf")
    back = _to_hf(_to_torch_dist(policy, tmp_path / "out"), tmp_path / "back")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / file).read_bytes() == (policy / file).read_bytes()
    reward = make_reward_model(policy, tmp_path / "reward", seed=1)
    middle = _to_torch_dist(reward, tmp_path / "critic")
    # a critic that was trained from a policy's folder: its own config says nothing of a value head
    config = json.loads((_to_hf(middle, tmp_path / "critic-back", companion=policy) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["num_labels"] == 1


def test_hf_folder_with_everything_wrong_is_one_complete_list(tmp_path: Path) -> None:
    folder = _change(
        make_tiny_llama(tmp_path / "hf"),
        {
            LAYER + "mlp.up_proj.weight": None,
            "model.norm.weight": torch.ones(32),
            LAYER + "self_attn.k_proj.weight": torch.ones(16, 64),
            LAYER + "self_attn.q_proj.weight": torch.ones(64, 64, dtype=torch.float64),
            "score.weight": torch.ones(1, 64),
        },
    )
    with pytest.raises(ConversionError) as caught:
        _to_torch_dist(folder, tmp_path / "out")
    lines = str(caught.value).splitlines()
    q, k, v = (f"{LAYER}self_attn.{one}_proj.weight" for one in "qkv")
    assert lines[0] == f"{folder} is not the llama language model that its config.json describes; 6 tensors:"
    assert sorted(line.strip() for line in lines[1:]) == sorted(
        [
            f"missing: {LAYER}mlp.up_proj.weight",
            "not used: score.weight",
            "model.norm.weight is [32], expected [64]",
            f"{k} is [16, 64], expected [32, 64]",
            f"{q} is of type F64, expected one of F32, BF16, F16",
            f"{q} and {k} and {v} are of different types: F32, F64",
        ]
    )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))


def test_torch_dist_of_another_model_is_one_complete_list(tmp_path: Path) -> None:
    middle = _to_torch_dist(make_tiny_llama(tmp_path / "hf", layers=3, tie=False), tmp_path / "out")
    _configure(middle / "hf", num_hidden_layers=4, intermediate_size=96, tie_word_embeddings=True)
    with pytest.raises(ConversionError) as caught:
        _to_hf(middle, tmp_path / "back")
    found = [line.strip() for line in str(caught.value).splitlines()[1:]]
    wrong = [line for layer in range(3) for line in (f"{layer}.mlp.linear_fc1.weight is [256, 64], expected [192, 64]",)]
    wrong += [f"{layer}.mlp.linear_fc2.weight is [64, 128], expected [64, 96]" for layer in range(3)]
    missing = ["input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm"]
    missing += ["mlp.linear_fc1", "mlp.linear_fc2"]
    expected = [f"decoder.layers.{line}" for line in wrong] + [f"missing: decoder.layers.3.{name}.weight" for name in missing]
    assert sorted(found) == sorted([*expected, "not used: output_layer.weight"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04"), r"\.metadata cannot be read"),
        (lambda folder: (folder / "__0_1.distcp").unlink(), r"__0_1\.distcp: No such file"),
        (lambda folder: (folder / "__0_1.distcp").write_bytes(b"short"), r"__0_1\.distcp has 5 bytes, expected [\d,]+ or more"),
        (lambda folder: shutil.rmtree(folder.parent / "hf"), r"no hf/config\.json beside it, .* --hf-folder"),
        (lambda folder: (folder / ".metadata").unlink(), r"names '0', but .* is not there"),
    ],
)
def test_damaged_torch_dist_is_a_checkpoint_error_that_says_what(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    middle = _to_torch_dist(make_tiny_llama(tmp_path / "hf"), tmp_path / "out")
    damage(middle / "iter_0000000")
    with pytest.raises(CheckpointError, match=message):
        _to_hf(middle, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_numbers_that_are_damaged_are_an_error_and_leave_nothing_behind(tmp_path: Path) -> None:
    middle = _to_torch_dist(make_tiny_llama(tmp_path / "hf"), tmp_path / "out")
    file = middle / "iter_0000000" / "__0_1.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__0_1\.distcp: embedding\.word_embeddings\.weight cannot be read"):
        _to_hf(middle, tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


@pytest.mark.parametrize("write", [_to_torch_dist, _to_hf])
def test_output_replaces_its_own_kind_alone(tmp_path: Path, write: Callable[[Path, Path], Path]) -> None:
    source = make_tiny_llama(tmp_path / "hf")
    if write is _to_hf:
        source = _to_torch_dist(source, tmp_path / "source")
    out = write(source, tmp_path / "out")
    write(source, out)
    notes = out / "thesis.txt"
    notes.write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds thesis.txt"):
        write(source, out)
    assert notes.read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]


def test_a_training_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    source = make_tiny_llama(tmp_path / "hf")
    out = _to_torch_dist(source, tmp_path / "out")
    (out / "iter_0000000").rename(out / "iter_0000020")
    with pytest.raises(CheckpointError, match=r"holds iter_0000020/.*: it is not an earlier conversion"):
        _to_torch_dist(source, out)


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_output_that_is_the_input_or_in_it_is_refused(tmp_path: Path, place: str) -> None:
    source = make_tiny_llama(tmp_path / "models" / "hf")
    with pytest.raises(CheckpointError, match="lie in each other"):
        _to_torch_dist(source, source / place)
    middle = _to_torch_dist(source, tmp_path / "torch" / "out")
    with pytest.raises(CheckpointError, match="lie in each other"):
        _to_hf(middle, middle / "iter_0000000" / place)
    assert HfWeights(source) and TorchDistReader(middle / "iter_0000000").tensors


def test_find_torch_dist_takes_the_iteration_the_folder_above_or_says_what_else_it_is(tmp_path: Path) -> None:
    middle = _to_torch_dist(make_tiny_llama(tmp_path / "hf"), tmp_path / "run" / "actor")
    iteration = middle / "iter_0000000"
    assert find_torch_dist(middle) == find_torch_dist(iteration)
    assert (find_torch_dist(middle).weights, find_torch_dist(middle).companion) == (iteration, middle / "hf")
    with pytest.raises(CheckpointError, match=f"this is a run folder: give {middle}"):
        find_torch_dist(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no such folder"):
        find_torch_dist(tmp_path / "nowhere")


def test_architecture_that_is_neither_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf")
    _configure(folder, architectures=["LlamaForTokenClassification"])
    with pytest.raises(ConversionError, match=r"LlamaForTokenClassification is not in this version"):
        _to_torch_dist(folder, tmp_path / "out")


def test_weight_that_float16_cannot_hold_is_refused_and_not_infinite(tmp_path: Path) -> None:
    norm = LAYER + "input_layernorm.weight"
    folder = make_tiny_llama(tmp_path / "hf")
    large = load_file(folder / WEIGHTS)[norm].clone()
    large[3], large[4] = -1e5, float("nan")
    middle = _to_torch_dist(_change(folder, {norm: large}), tmp_path / "nan")
    assert _to_hf(middle, tmp_path / "out", torch.float16).is_dir(), "what is broken before stays so"
    large[4] = 6e4
    middle = _to_torch_dist(_change(folder, {norm: large}), tmp_path / "middle")
    with pytest.raises(CheckpointError, match=rf"{norm} holds 100000, and torch.float16 nothing above 65504. Take bfloat16 or"):
        _to_hf(middle, tmp_path / "new", torch.float16)
    assert not list(tmp_path.glob("new*"))
    large[3] = -6e4
    middle = _to_torch_dist(_change(folder, {norm: large}), tmp_path / "less")
    assert load_file(_to_hf(middle, tmp_path / "new", torch.float16) / WEIGHTS)[norm][3:5].tolist() == [-6e4, 6e4]


def test_no_room_on_the_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llama(tmp_path / "hf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="the output needs 0.0 GB. Make room"):
        _to_torch_dist(folder, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("write", [_to_torch_dist, _to_hf])
def test_file_that_cannot_be_written_to_its_end_is_an_error_and_leaves_the_earlier_output(
    tmp_path: Path, write: Callable[[Path, Path], Path]
) -> None:
    """As on a full disk, which is not full yet when the writing starts."""
    source = make_tiny_llama(tmp_path / "hf")
    if write is _to_hf:
        source = _to_torch_dist(source, tmp_path / "source")
    out = write(source, tmp_path / "out")
    before = file_sizes(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*File too large.*\): make room, or write elsewhere"):
            write(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file_sizes(out) == before and [path.name for path in tmp_path.glob("out*")] == ["out"]


def _input(tmp_path: Path, write: Callable[..., Path]) -> Path:
    source = make_tiny_llama(tmp_path / "hf")
    return source if write is _to_torch_dist else _to_torch_dist(source, tmp_path / "source")


@pytest.mark.parametrize("write", [_to_torch_dist, _to_hf])
def test_everything_that_is_published_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Path], Path]
) -> None:
    source, out, steps = _input(tmp_path, write), tmp_path / "new" / "out", list[str]()
    fsync, rename = os.fsync, Path.rename

    def flushed(handle: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        steps.append(f"name of {target}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    write(source, out)
    partial, named = str(out.with_name("out.partial")), steps.index(f"name of {out}")
    expected = {partial, *(f"{partial}/{path.relative_to(out)}" for path in out.rglob("*"))}
    assert expected <= set(steps[:named]) and str(tmp_path) in steps[:named]
    assert steps[named + 1 :] == [str(out.parent)]


@pytest.mark.parametrize("write", [_to_torch_dist, _to_hf])
def test_disk_that_is_full_after_the_weights_is_an_error_and_leaves_the_earlier_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Path], Path]
) -> None:
    source = _input(tmp_path, write)
    out = write(source, tmp_path / "out")
    before = file_sizes(out)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(CheckpointError, match=r"out cannot be written \(.*No space left.*\): make room, or write elsewhere"):
        write(source, out)
    assert file_sizes(out) == before and [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize("write", [_to_torch_dist, _to_hf])
def test_earlier_output_that_a_killed_run_has_set_aside_is_not_lost_when_the_next_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Path], Path]
) -> None:
    """Killed between its two renames, a run leaves `out.old` and no `out`."""
    source, rename = _input(tmp_path, write), Path.rename
    aside = write(source, tmp_path / "out").rename(tmp_path / "out.old")
    before = file_sizes(aside)

    def renamed(self: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(CheckpointError, match="Permission denied"):
        write(source, tmp_path / "out")
    found = tmp_path / "out" if (tmp_path / "out").exists() else aside
    assert file_sizes(found) == before
    monkeypatch.undo()
    assert file_sizes(write(source, tmp_path / "out")) == before and not aside.exists()


@pytest.mark.parametrize("wrong", ["numbers", "shapes", "gone"])
@pytest.mark.parametrize("write", [_to_torch_dist, _to_hf])
def test_input_that_changes_while_it_is_read_is_no_mixture_of_two_models(
    tmp_path: Path, write: Callable[[Path, Path], Path], wrong: str
) -> None:
    """As when a run saves over it: the rest comes from another model of the same shape, of another one, or from nowhere."""
    source, out = _input(tmp_path, write), tmp_path / "out"
    other = make_tiny_llama(tmp_path / "other", seed=1, hidden=64 if wrong == "numbers" else 32)
    if write is _to_hf:
        other = _to_torch_dist(other, tmp_path / "other-torch-dist")

    def change(_: int) -> None:
        shutil.rmtree(source, ignore_errors=True)
        if wrong != "gone":
            shutil.copytree(other, source)

    with pytest.raises(CheckpointError, match=r"has changed while it was read, so nothing is written. Convert again"):
        if write is _to_hf:
            plan = plan_hf(source, companion=tmp_path / "hf", dtype=None, max_file_bytes=10**9)
            write_hf_folder(plan, out, change)
        else:
            write_torch_dist_folder(plan_torch_dist(source, dtype=None, make_vocab_size_divisible_by=1), out, change)
    assert list(tmp_path.glob("out*")) == []


def test_padding_of_any_size_is_zeros_in_pieces_that_fit_in_memory(tmp_path: Path) -> None:
    plan = plan_torch_dist(make_tiny_llama(tmp_path / "hf"), dtype=None, make_vocab_size_divisible_by=1 << 20)
    weights, *padding = [chunk for chunk in plan.chunks if chunk.key == "embedding.word_embeddings.weight"]
    assert weights.shape == (100, 64) and {chunk.whole for chunk in padding} == {(1 << 20, 64)}
    rows = 100
    for chunk in padding:
        assert chunk.start == (rows, 0) and chunk.num_bytes <= 16 << 20
        rows += chunk.shape[0]
    assert rows == 1 << 20 and not padding[-1].make().any() and padding[-1].make().shape == padding[-1].shape


def test_folder_that_is_the_input_beside_the_output_is_not_swept_away(tmp_path: Path) -> None:
    """Config and tokenizer lie in `out.old`, which the writer would take for what it replaces."""
    middle = _to_torch_dist(make_tiny_llama(tmp_path / "hf"), tmp_path / "middle")
    companion = make_tiny_llama(tmp_path / "out.old")
    before = file_sizes(companion)
    with pytest.raises(CheckpointError, match="lie in each other"):
        _to_hf(middle, tmp_path / "out", companion=companion)
    assert file_sizes(companion) == before


def test_hugging_face_cache_of_links_converts_and_an_export_of_it_has_none(tmp_path: Path) -> None:
    blobs, snapshot = make_tiny_llama(tmp_path / "hub" / "blobs"), tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        path.chmod(0o444)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    back = _to_hf(_to_torch_dist(snapshot, tmp_path / "out"), tmp_path / "back")
    assert _unequal(back, snapshot) == [] and not any(path.is_symlink() for path in back.iterdir())
    _to_hf(tmp_path / "out", back)


def test_interrupt_while_a_tensor_is_written_is_an_interrupt_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save makes an error about its archive of it."""
    source, save = make_tiny_llama(tmp_path / "hf"), torch.save

    class Interrupted(io.BytesIO):
        """In the second of several writes."""

        num_writes = 0

        def write(self, content: Any) -> int:
            self.num_writes += 1
            if self.num_writes == 2:
                raise KeyboardInterrupt
            return super().write(content)

    def interrupted(content: object, file: Any) -> None:
        save(content, Interrupted() if isinstance(content, torch.Tensor) else file)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        torch.save(torch.ones(1), io.BytesIO())
    with pytest.raises(KeyboardInterrupt):
        _to_torch_dist(source, tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []
