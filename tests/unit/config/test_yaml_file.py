"""YAML files: values by the option's type, and errors with file and line."""

from pathlib import Path

import pytest

from slime_ppo.config.yaml_file import read_config_file
from slime_ppo.errors import ConfigError


def _read(folder: Path, text: str) -> dict[str, tuple[object, str]]:
    path = folder / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return {one.spec.key: (one.value, one.origin.removeprefix(f"{folder}/")) for one in read_config_file(str(path))}


def _error(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


def test_read_config_file_takes_values_by_option_type_with_their_lines(tmp_path: Path) -> None:
    text = "optimizer:\n  lr: 1e-6\n  # comment\n  min_lr: 0\nmodel: {hf_checkpoint: 'null', ref_load: null}\ncritic:\n  lr: 1\n"
    assert _read(tmp_path, text) == {
        "optimizer.lr": (1e-6, "a.yaml:2"),
        "optimizer.min_lr": (0.0, "a.yaml:4"),
        "model.hf_checkpoint": ("null", "a.yaml:5"),
        "model.ref_load": (None, "a.yaml:5"),
        "critic.lr": (1.0, "a.yaml:7"),
    }


@pytest.mark.parametrize("text", ["", "# only a comment\n", "critic:\n", "critic: {}\n"])
def test_read_config_file_without_keys_gives_nothing(tmp_path: Path, text: str) -> None:
    assert _read(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run:\n  seed: 1\n  sed: 2\n", ("a.yaml:3", "unknown key 'sed' in section run", "Did you mean 'seed'?")),
        ("run:\n  lr: 1\n", ("a.yaml:2", "belongs to section optimizer", "write it as lr under `optimizer:`")),
        ("run:\n  critic_lr: 1\n", ("a.yaml:2", "belongs to section critic", "write it as lr under `critic:`")),
        ("critic:\n  critic-lr: 1\n", ("a.yaml:2", "Did you mean 'lr'?")),
        ("run:\n  micro_batch_sise: 1\n", ("a.yaml:2", "Did you mean 'micro_batch_size' of section batch?")),
        ("tracking:\n  qqqqqq: 1\n", ("a.yaml:2", "Keys of this section are use_tensorboard, use_wandb")),
        ("\noptimiser:\n  lr: 1\n", ("a.yaml:2", "unknown section 'optimiser'", "Did you mean 'optimizer'?")),
        ("lr: 1\n", ("a.yaml:1", "It is a key of section optimizer")),
        ("critic_lr: 1\n", ("a.yaml:1", "write it as lr under `critic:`")),
        ("run:\n  seed: 1\nrun:\n  num_rollout: 2\n", ("a.yaml:3", "run was given in line 1 already")),
        ("run:\n  seed: 1\n  seed: 2\n", ("a.yaml:3", "seed was given in line 2 already")),
        ("run:\n  seed: one\n", ("a.yaml:2", "run.seed is one, expected a whole number >= 0")),
        ("run:\n  seed: 1.0\n", ("a.yaml:2", "run.seed is 1.0, expected a whole number")),
        ("run:\n  seed: '1'\n", ("a.yaml:2", "run.seed is '1', expected a whole number", "without quotes")),
        ("run:\n  seed:\n", ("a.yaml:2", "run.seed is null, expected a whole number")),
        ("run:\n  seed: [1]\n", ("a.yaml:2", "run.seed is a list, expected")),
        ("run:\n  seed: {a: 1}\n", ("a.yaml:2", "run.seed is a block of keys, expected")),
        ("run:\n  seed: -1\n", ("a.yaml:2", "run.seed is -1, expected a whole number >= 0")),
        ("run:\n  save: 12\n", ("a.yaml:2", "run.save is 12, expected a text", "Quote the value")),
        ("run:\n  save: on\n", ("a.yaml:2", "run.save is on, expected a text", "Quote the value")),
        ("run:\n  overwrite: yes\n", ("a.yaml:2", "run.overwrite is yes, expected true or false")),
        ("optimizer:\n  lr: .nan\n", ("a.yaml:2", "optimizer.lr is .nan, expected a number")),
        ("optimizer:\n  lr: nan\n", ("a.yaml:2", "optimizer.lr is nan, expected a number")),
        ("ppo:\n  kl_loss_type: k4\n", ("a.yaml:2", "ppo.kl_loss_type is k4, expected one of k1, k2, k3, low_var_kl")),
        ("run:\n  seed: !!python/name:os.system 1\n", ("a.yaml:2", "run.seed is a Python tag (python/name:os.system)")),
        ("run: 3\n", ("a.yaml:1", "section run is 3, expected `key: value` lines")),
        ("- run\n", ("a.yaml:1", "the file is a list, expected `key: value` lines")),
        ("run:\n  ? [a]\n  : 1\n", ("a.yaml:2", "a key of section run is a list, expected a name")),
        ("run:\n  seed: 1\n seed: 2\n", ("a.yaml:3", "not valid YAML")),
        ("run:\n  seed: 1\n---\nrun:\n  seed: 2\n", ("a.yaml:3", "not valid YAML", "single document")),
        ("run:\n  save: \x01\n", ("a.yaml", "not valid YAML")),
    ],
)
def test_read_config_file_with_a_mistake_names_line_and_fix(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    message = _error(tmp_path, text)
    assert [part for part in parts if part not in message] == [], message


def test_read_config_file_that_is_missing_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*nowhere.yaml: cannot be read \(No such file or directory\)"):
        read_config_file(str(tmp_path / "nowhere.yaml"))


def test_read_config_file_that_is_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_config_file(str(tmp_path))


def test_read_config_file_in_another_encoding_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("run:\n  save: caf\xe9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 16\)"):
        read_config_file(str(path))
