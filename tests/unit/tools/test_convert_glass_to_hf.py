import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tools import convert_glass_to_hf as tool

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def glass() -> tool.GlassModel:
    return tool.load_glass()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "glass-en"
    tool.convert(out, force=False)
    return out


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "convert_glass_to_hf.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_logits_in_transformers_equal_the_packages_own(glass: tool.GlassModel, folder: Path) -> None:
    """Reference: glassllm's own forward pass. Also proves that AutoModelForCausalLM and AutoTokenizer load the folder."""
    assert tool.largest_difference(glass, folder) < 1e-4


def test_tokens_equal_the_packages_own(glass: tool.GlassModel, folder: Path) -> None:
    """Reference: glassllm's own tokenizer, on text with line breaks, runs of spaces, digits, accents and unknown letters."""
    tokenizer = tool.fast_tokenizer(glass)
    texts = [
        "The clerk put the letter on the desk.",
        "  two  spaces\nand a line\n\n— “quoted”, 1865; Æsop's fables",
        "e\u0301te\u0301, na\u00efve and 你好",
        " ",
        "aaaa baaab llll",
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == glass.tokenizer.encode(text)
        if 1 not in ids:
            assert tokenizer.decode(ids) == text


def test_weights_padding_is_zero_and_the_rest_is_untouched(glass: tool.GlassModel, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    gate, down = tensors["model.layers.2.mlp.gate_proj.weight"], tensors["model.layers.2.mlp.down_proj.weight"]
    assert (gate.shape, down.shape) == ((352, 128), (128, 352))
    assert np.array_equal(gate[:341], glass.parameters["blocks.2.ffn.W1"].T)
    assert np.array_equal(down[:, :341], glass.parameters["blocks.2.ffn.W2"].T)
    assert not gate[341:].any()
    assert not down[:, 341:].any()


def test_config_states_the_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    assert [config[key] for key in shape] == [128, 4, 4, 2, 352, 1024]
    assert (config["model_type"], config["tie_word_embeddings"], config["max_position_embeddings"]) == ("llama", True, 128)


def test_command_writes_five_files_and_one_line_without_torch(tmp_path: Path) -> None:
    out = tmp_path / "new" / "glass-en"
    code = f"import sys; sys.argv = ['convert', {str(out)!r}]; import runpy\n"
    code += f"try:\n    runpy.run_path({str(ROOT / 'tools' / 'convert_glass_to_hf.py')!r}, run_name='__main__')\n"
    code += "except SystemExit as end:\n    assert end.code == 0\nassert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: English model of glassllm as a Llama folder, 852,608 parameters, float32\n"
    assert sorted(file.name for file in out.iterdir()) == sorted(tool.FILES)
    assert [entry.name for entry in out.parent.iterdir()] == ["glass-en"]


def test_command_non_empty_output_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {tmp_path} is not empty (it holds config.json); choose another folder, or replace it with --force\n"
    )
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"


def test_convert_force_replaces_an_earlier_conversion(tmp_path: Path) -> None:
    out = tmp_path / "glass-en"
    out.mkdir()
    (out / "config.json").write_text("{}", encoding="utf-8")
    tool.convert(out, force=True)
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["model_type"] == "llama"
    assert [entry.name for entry in tmp_path.iterdir()] == ["glass-en"]


def test_convert_force_leaves_a_folder_with_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(tool.ConvertError, match="holds thesis.txt, which this tool did not write, and is left as it is"):
        tool.convert(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").exists()


def test_convert_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(tool.ConvertError, match="file is a file; expected a folder"):
        tool.convert(tmp_path / "file", force=True)


def test_convert_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(glass: tool.GlassModel, folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "write_folder", fail)
    with pytest.raises(KeyboardInterrupt):
        tool.convert(tmp_path / "glass-en", force=False)
    assert list(tmp_path.iterdir()) == []


def test_load_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glassllm", None)
    with pytest.raises(tool.ConvertError, match=r"the package glassllm is missing .*pip install glassllm==0.1.0"):
        tool.load_glass()
