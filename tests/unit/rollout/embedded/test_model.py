"""Loading a model folder, and the memory of its parameters."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from slime_ppo.errors import CheckpointError
from slime_ppo.rollout.embedded.model import ParameterMemory, load_causal_lm
from tests.helpers.tiny_family import make_tiny_family
from tests.helpers.tiny_llama import make_tiny_llama


def _load(folder: Path, dtype: str = "float32") -> torch.nn.Module:
    return load_causal_lm(folder, dtype=dtype, device="cpu", trust_remote_code=False)


def test_load_causal_lm_is_ready_to_generate_and_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = _load(make_tiny_llama(tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert "".join(capfd.readouterr()) == ""


def test_load_causal_lm_bfloat16_holds_bfloat16_parameters(tmp_path: Path) -> None:
    assert {p.dtype for p in _load(make_tiny_llama(tmp_path), "bfloat16").parameters()} == {torch.bfloat16}


def test_load_causal_lm_missing_folder_raises_naming_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing-here is not a Hugging Face model folder: it has no config.json"):
        _load(tmp_path / "nothing-here")


def test_load_causal_lm_folder_without_weights_raises(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not load as a causal language model"):
        _load(tmp_path)


def test_load_causal_lm_damaged_weights_raises(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="does not load as a causal language model"):
        _load(tmp_path)


def test_load_causal_lm_lost_tensor_raises_instead_of_random_values(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack tensors .*model.layers.1.mlp.up_proj.weight"):
        _load(tmp_path)


def test_load_causal_lm_remote_code_is_refused_by_default(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('remote code ran')\n")
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        _load(tmp_path)


@pytest.mark.parametrize("tie", [True, False])
def test_parameter_memory_free_and_allocate_change_resident_bytes(tmp_path: Path, tie: bool) -> None:
    model = _load(make_tiny_llama(tmp_path, tie=tie))
    memory = ParameterMemory(model)
    parameter_bytes = sum(array.nbytes for array in load_file(tmp_path / "model.safetensors").values())
    buffer_bytes = memory.bytes_resident() - parameter_bytes
    assert 0 < buffer_bytes < 1000
    memory.free()
    assert memory.bytes_resident() == buffer_bytes
    memory.allocate()
    assert memory.bytes_resident() == parameter_bytes + buffer_bytes


def test_parameter_memory_tied_parameter_is_named_once(tmp_path: Path) -> None:
    names = list(ParameterMemory(_load(make_tiny_llama(tmp_path, tie=True))).parameters)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_parameter_memory_write_through_parameters_changes_model(tmp_path: Path) -> None:
    model = _load(make_tiny_llama(tmp_path))
    memory = ParameterMemory(model)
    memory.free()
    memory.allocate()
    with torch.no_grad():
        for parameter in memory.parameters.values():
            parameter.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in model.parameters())


@pytest.mark.parametrize("tie", [True, False])
def test_load_causal_lm_fp32_lm_head_makes_float32_logits_of_a_bfloat16_trunk(tmp_path: Path, *, tie: bool) -> None:
    folder = make_tiny_llama(tmp_path, tie=tie)
    wide, narrow = (
        load_causal_lm(folder, dtype="bfloat16", device="cpu", trust_remote_code=False, fp32_lm_head=fp32) for fp32 in (True, False)
    )
    own = {name for name, parameter in wide.named_parameters() if parameter.dtype == torch.float32}
    assert own == {"model.embed_tokens.weight" if tie else "lm_head.weight"}
    ids = torch.arange(8)[None]
    found, rounded = wide(ids).logits, narrow(ids).logits
    assert (found.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    weight = narrow.get_output_embeddings().weight.float()
    assert torch.allclose(found, narrow.model(ids).last_hidden_state.float() @ weight.T, atol=1e-6)


def test_parameter_memory_names_the_matrices_of_fused_experts_as_folders_do(tmp_path: Path) -> None:
    """In the memory of the fused parameter, also after it was freed: writing to one expert changes that expert alone."""
    model = _load(make_tiny_family(tmp_path, "qwen3_moe", tie=False, seed=0))
    memory, source = ParameterMemory(model), load_file(tmp_path / "model.safetensors")
    assert sorted(memory.parameters) == sorted(source)
    assert all(torch.equal(memory.parameters[name], torch.tensor(tensor)) for name, tensor in source.items())
    named = memory.parameters
    memory.free()
    assert memory.bytes_resident() < 1000
    memory.allocate()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        named["model.layers.2.mlp.experts.5.up_proj.weight"].fill_(1.0)
    assert model.get_parameter("model.layers.2.mlp.experts.gate_up_proj")[5, 32:].eq(1.0).all()
    assert sum(float(parameter.sum()) for parameter in model.parameters()) == 32 * 64
