"""Checks on files: folders, prompt files, roles apart, a free and writable run folder."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.preflight import check_files, preflight
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config, write_model_folder

Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Configs whose files are all there, but for what the test changes."""
    folder = write_model_folder(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The door was"}\n', encoding="utf-8")
    good: dict[str, Value] = {
        "model__hf_checkpoint": str(folder),
        "data__prompt_data": str(prompts),
        "data__rollout_max_prompt_len": 32,
        "run__save": str(tmp_path / "deep" / "run"),
        "critic__init_value_head": "zeros",
    }
    return lambda **values: make_config(**(good | values))


def _refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    return str(caught.value)


def test_preflight_of_a_good_config_gives_shapes_and_leaves_nothing(make: Make, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    shapes = preflight(make())
    assert (shapes.actor.num_layers, shapes.critic) == (4, shapes.actor)
    assert sorted(tmp_path.rglob("*")) == before


def test_preflight_with_a_missing_model_folder_names_flag_and_path(make: Make, tmp_path: Path) -> None:
    assert _refusal(make(model__hf_checkpoint="nowhere")).startswith("--hf-checkpoint nowhere: no such folder")
    assert _refusal(make(model__ref_load="nowhere")).startswith("--ref-load nowhere: no such folder")
    assert _refusal(make(critic__load="nowhere")).startswith("--critic-load nowhere: no such folder")
    assert ": is a file, expected a local Hugging Face folder" in _refusal(make(critic__load=str(tmp_path / "prompts.jsonl")))


def test_preflight_with_a_wrong_model_folder_says_what_it_holds(make: Make, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert "has no config.json" in _refusal(make(model__ref_load=str(other)))
    assert "found an empty folder" in _refusal(make(model__ref_load=str(other)))
    (other / "config.json").write_text("{}", encoding="utf-8")
    assert "has no .safetensors file, expected the model's weights; found config.json" in _refusal(make(model__ref_load=str(other)))
    (other / "model.safetensors").touch()
    assert "config.json: has no 'model_type'" in _refusal(make(model__ref_load=str(other)))


def test_preflight_with_a_reference_of_another_shape_names_both_numbers(make: Make, tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other", num_hidden_layers=2, eos_token_id=9)
    assert "has num_layers 2, but the actor" in _refusal(make(model__ref_load=str(other)))
    preflight(make(model__ref_load=str(write_model_folder(tmp_path / "same", eos_token_id=9))))


def test_preflight_with_a_critic_of_another_depth_passes_but_not_of_another_vocabulary(make: Make, tmp_path: Path) -> None:
    assert preflight(make(critic__load=str(write_model_folder(tmp_path / "small", num_hidden_layers=2)))).critic.num_layers == 2
    assert "has vocab_size 99, but the actor" in _refusal(
        make(critic__load=str(write_model_folder(tmp_path / "odd", vocab_size=99)))
    )


def test_preflight_checks_each_role_against_its_own_shape(make: Make, tmp_path: Path) -> None:
    odd = write_model_folder(tmp_path / "odd", intermediate_size=341)
    values: dict[str, Value] = {"parallel__actor_num_gpus_per_node": 2, "parallel__tensor_model_parallel_size": 2}
    preflight(make(**values))
    assert "2 of the critic does not divide the 341 FFN columns" in _refusal(make(**values, critic__load=str(odd)))


def test_check_files_with_missing_prompts_names_flag_and_path(make: Make, tmp_path: Path) -> None:
    assert _refusal(make(data__prompt_data="nowhere.jsonl")).startswith("--prompt-data nowhere.jsonl: no such file")
    (tmp_path / "empty").mkdir()
    assert "empty (--prompt-data) holds no prompts" in _refusal(make(data__prompt_data=f"{tmp_path}/empty@[:9]"))
    evaluating: dict[str, Value] = {"eval__eval_interval": 1, "eval__eval_prompt_data": "nowhere.jsonl"}
    assert _refusal(make(**evaluating)).startswith("--eval-prompt-data nowhere.jsonl: no such file")
    check_files(make(**(evaluating | {"eval__eval_interval": 0})))
    there = tmp_path / "there.jsonl"
    there.write_text("{}")
    several: dict[str, Value] = {"eval__eval_interval": 1, "eval__eval_prompt_data": f"one={there},two=nowhere.jsonl"}
    assert _refusal(make(**several)).startswith("--eval-prompt-data nowhere.jsonl: no such file")
    check_files(make(**(several | {"eval__eval_prompt_data": f"one={there},two={there}"})))


def test_check_files_with_a_slice_looks_for_its_file(make: Make, tmp_path: Path) -> None:
    check_files(make(data__prompt_data=f"{tmp_path}/prompts.jsonl@[:1]"))
    assert _refusal(make(data__prompt_data="nowhere.jsonl@[:1]")).startswith("--prompt-data nowhere.jsonl@[:1]: no such file")
    values: dict[str, Value] = {"data__prompt_data": f"{tmp_path}/run/hf/p.jsonl@[:1]", "run__save": str(tmp_path / "run")}
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "p.jsonl").touch()
    assert "p.jsonl (--prompt-data), which the run would overwrite" in _refusal(make(**values))


def test_check_files_with_a_missing_chat_template_names_it(make: Make, tmp_path: Path) -> None:
    values: dict[str, Value] = {"data__apply_chat_template": True, "data__chat_template": "nowhere.jinja"}
    assert _refusal(make(**values)).startswith("--chat-template nowhere.jinja: no such file, expected a Jinja template")
    check_files(make(**(values | {"data__apply_chat_template": False})))


@pytest.mark.parametrize(
    ("folder", "taken"),
    [
        ("run/hf", "run/hf"),
        ("run/hf/deeper", "run/hf"),
        ("link/hf", "run/hf"),
        ("run/hf.partial", "run/hf.partial"),
        ("run/logs", "run/logs"),
        ("run/logs/critic", "run/logs"),
        ("run/tensorboard", "run/tensorboard"),
    ],
)
def test_check_files_with_a_critic_folder_where_the_run_writes_is_refused(
    make: Make, tmp_path: Path, folder: str, taken: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    message = _refusal(make(run__save=str(tmp_path / "run"), critic__save=f"{tmp_path}/{folder}"))
    assert message.startswith(f"--critic-save {tmp_path}/{folder} is in {tmp_path}/{taken}, ")
    assert "Give the critic a folder of its own" in message


@pytest.mark.parametrize("folder", ["run", "run/", "link", ""])
def test_check_files_with_a_critic_folder_that_holds_the_run_is_refused(make: Make, tmp_path: Path, folder: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    message = _refusal(make(run__save=str(tmp_path / "run"), critic__save=f"{tmp_path}/{folder}"))
    assert f"{tmp_path}/run (--save), which the run would overwrite" in message


@pytest.mark.parametrize(
    ("option", "flag", "name"),
    [
        ("model__hf_checkpoint", "--hf-checkpoint", ""),
        ("model__ref_load", "--ref-load", ""),
        ("critic__load", "--critic-load", ""),
        ("data__prompt_data", "--prompt-data", "prompts.jsonl"),
    ],
)
def test_check_files_with_a_critic_folder_that_holds_an_input_is_refused(
    make: Make, tmp_path: Path, option: str, flag: str, name: str
) -> None:
    given = write_model_folder(tmp_path / "inputs" / "given")
    (given / "prompts.jsonl").write_text('{"prompt": "The door was"}\n', encoding="utf-8")
    read = given / name
    for folder in {given, given.parent}:
        message = _refusal(make(**{option: str(read)}, critic__save=str(folder)))
        assert message.startswith(f"--critic-save {folder} {'is' if folder == read else 'holds'} {read} (")
        assert flag in message and "which the run would overwrite" in message


def test_check_files_that_loads_from_inside_the_run_folder_is_refused(make: Make, tmp_path: Path) -> None:
    inside = write_model_folder(tmp_path / "run" / "hf")
    config = make(checkpoint__load=str(inside), run__save=str(inside.parent), run__overwrite=True)
    assert f"holds {inside} (--load), which the run would overwrite" in _refusal(config)


def test_check_files_with_a_critic_folder_that_holds_the_current_directory_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "work" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for folder in (".", ".."):
        assert "(the current directory), which the run would overwrite" in _refusal(make(critic__save=folder))


def test_check_files_that_would_overwrite_the_model_is_refused(make: Make, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    assert f"--save {model} is {model} (--hf-checkpoint), which" in _refusal(make(run__save=model, run__overwrite=True))
    hf = write_model_folder(tmp_path / "run" / "hf")
    again = make(model__hf_checkpoint=str(hf), run__save=str(tmp_path / "run"), run__overwrite=True)
    assert f"--save (its hf folder) {hf} is {hf} (--hf-checkpoint), which" in _refusal(again)


@pytest.mark.parametrize("place", ["critic/hf", "run/hf", "critic/hf.partial", "run/hf.old"])
def test_check_files_with_a_folder_that_would_be_deleted_is_refused_even_with_overwrite(
    make: Make, tmp_path: Path, place: str
) -> None:
    folder = write_model_folder(tmp_path / place)
    values: dict[str, Value] = {
        "run__save": str(tmp_path / "run"),
        "critic__save": str(tmp_path / "critic"),
        "run__overwrite": True,
    }
    ran_before(make(**values))
    check_files(make(**values))
    (folder / "thesis.txt").touch()
    message = _refusal(make(**values))
    assert message.startswith("--critic-save (its hf folder): " if "critic" in place else "--save (its hf folder): ")
    assert f"{folder} holds thesis.txt: it is not an earlier export" in message
    check_files(make(**values, model__save_hf=False))
    assert (folder / "thesis.txt").exists()


def ran_before(config: Config) -> None:
    """What a run with this config leaves of itself."""
    Path(config.run.save).mkdir(exist_ok=True)
    (Path(config.run.save) / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")


def test_check_files_with_saved_weights_in_the_critic_folder_needs_overwrite_and_a_run_that_has_saved_them(
    make: Make, tmp_path: Path
) -> None:
    folder = str(tmp_path / "critic")
    write_model_folder(tmp_path / "critic" / "hf")
    values: dict[str, Value] = {"critic__save": folder, "run__save": str(tmp_path / "run")}
    foreign = f"--critic-save (its hf folder) {folder}/hf: already holds saved weights. Choose another folder, or move them away"
    assert foreign in _refusal(make(**values))
    for other in (None, make(**(values | {"critic__save": f"{tmp_path}/other"})), make(**(values | {"critic__save": None}))):
        if other is not None:
            ran_before(other)
        assert foreign in _refusal(make(**values, run__overwrite=True)), "no run in --save has saved them"
    ran_before(make(**values))
    assert "already holds saved weights. Choose another folder, or say --overwrite" in _refusal(make(**values))
    check_files(make(**values, run__overwrite=True))
    (tmp_path / "run" / "run_state.json").touch()
    check_files(make(**values, checkpoint__load=str(tmp_path / "run")))
    (tmp_path / "empty").mkdir()
    check_files(make(critic__save=str(tmp_path / "empty")))


@pytest.mark.parametrize(("option", "flag"), [("hf_checkpoint", "actor"), ("ref_load", "reference")])
def test_preflight_with_broken_weights_names_the_file(make: Make, tmp_path: Path, option: str, flag: str) -> None:
    folder = write_model_folder(tmp_path / flag)
    (folder / "model.safetensors").write_bytes(b"")
    values: dict[str, Value] = {f"model__{option}": str(folder)}
    assert _refusal(make(**values)).startswith(f"{folder}/model.safetensors ends inside its header (0 bytes)")


def test_check_files_with_a_used_run_folder_needs_overwrite(make: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    check_files(make(run__save=str(run)))
    (run / "metrics.jsonl").touch()
    assert "already holds a run (metrics.jsonl)" in _refusal(make(run__save=str(run)))
    check_files(make(run__save=str(run), run__overwrite=True))
    (run / "metrics.jsonl").rename(run / "run_state.json")
    message = _refusal(make(run__save=str(run)))
    assert "already holds a run (run_state.json)" in message and f"go on with that run by --load {run}" in message


def test_check_files_with_a_run_that_goes_on_in_its_folder_needs_no_overwrite(make: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_model_folder(run / "hf")
    (run / "metrics.jsonl").touch()
    values: dict[str, Value] = {"run__save": str(run), "checkpoint__load": f"{tmp_path}/./run"}
    text = _refusal(make(**values))  # a run that begins there would lose them
    assert "already holds saved weights" in text and "bring run_state.json back, without which --load" in text
    (run / "run_state.json").touch()
    check_files(make(**values))


def test_check_files_with_a_save_folder_that_cannot_be_written_says_why(make: Make, tmp_path: Path) -> None:
    inside_a_file = str(tmp_path / "prompts.jsonl" / "run")
    assert f"--save {inside_a_file}: cannot write in {tmp_path}/prompts.jsonl (Not a directory)" in _refusal(
        make(run__save=inside_a_file)
    )
    # the kernel's folder refuses new files, also to root
    assert _refusal(make(run__save="/proc/slime_run")).startswith("--save /proc/slime_run: cannot write in /proc (")
    assert _refusal(make(critic__save="/proc/slime_critic")).startswith("--critic-save /proc/slime_critic: cannot write")
    unwritable: dict[str, Value] = {"rollout__weight_sync_folder": "/proc/slime_sync", "rollout__engine": "sglang"}
    assert _refusal(make(rollout__weight_sync="disk", **unwritable)).startswith("--weight-sync-folder /proc/slime_sync: cannot")
    check_files(make(rollout__weight_sync="distributed", **unwritable))


def test_check_files_with_a_linked_run_folder_sees_through_the_link(make: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    values: dict[str, Value] = {"run__save": str(tmp_path / "link"), "critic__save": str(tmp_path / "run")}
    assert _refusal(make(**values)).startswith(f"--critic-save {tmp_path}/run is {tmp_path}/run (--save), which")


def test_preflight_of_half_a_run_asks_for_what_that_half_reads(make: Make, tmp_path: Path) -> None:
    evaluating: dict[str, Value] = {"eval__eval_interval": 1, "eval__eval_prompt_data": "nowhere.jsonl"}
    preflight(make(**evaluating, debug__debug_train_only=True, debug__load_debug_rollout_data="dumps"))
    critic: dict[str, Value] = {"critic__load": str(tmp_path / "nowhere"), "parallel__tensor_model_parallel_size": 3}
    assert preflight(make(**critic, debug__debug_rollout_only=True)).critic is None
    assert "nowhere.jsonl: no such file" in _refusal(make(**evaluating, debug__debug_rollout_only=True))


def test_preflight_with_a_rollout_of_another_run_where_this_one_keeps_them_refuses(make: Make, tmp_path: Path) -> None:
    where: dict[str, Value] = {"debug__save_debug_rollout_data": str(tmp_path / "dumps")}
    preflight(make(**where))
    assert not (tmp_path / "dumps").exists()
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "rollout_0000000.npz").touch()
    assert "already holds rollout_0000000.npz of another run" in _refusal(make(**where))
    (tmp_path / "file").touch()
    assert "--save-debug-rollout-data" in _refusal(make(debug__save_debug_rollout_data=str(tmp_path / "file" / "dumps")))


def test_preflight_without_a_critic_asks_nothing_of_its_folders(make: Make, tmp_path: Path) -> None:
    weights = write_model_folder(tmp_path / "kept" / "hf").parent
    for critic in ({"critic__load": "nowhere"}, {"critic__save": "/proc/slime_critic"}, {"critic__save": str(weights)}):
        shapes = preflight(make(**critic, ppo__advantage_estimator="grpo"))
        assert (shapes.actor.num_layers, shapes.critic) == (4, None)
        with pytest.raises(ConfigError, match="critic"):
            preflight(make(**critic))


def _write_tensor(folder: Path, shape: tuple[int, int]) -> None:
    """Weights of one tensor, score.weight."""
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"score.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_preflight_critic_without_a_value_head_is_told_how_to_start_one(make: Make, tmp_path: Path) -> None:
    headless: dict[str, Value] = {"critic__init_value_head": None}
    message = _refusal(make(**headless))
    assert message.startswith(f"the critic starts from --hf-checkpoint {tmp_path}/model, which holds no value head (score.weight)")
    assert "--init-value-head zeros or normal" in message
    policy = write_model_folder(tmp_path / "policy")
    assert f"starts from --critic-load {policy}, which" in _refusal(make(**headless, critic__load=str(policy)))
    preflight(make(**headless, critic__load=str(policy), ppo__advantage_estimator="grpo"))
    for start in ("zeros", "normal"):
        preflight(make(critic__init_value_head=start))


def test_preflight_critic_from_a_reward_model_needs_one_label_and_no_start(make: Make, tmp_path: Path) -> None:
    reward_model = write_model_folder(tmp_path / "reward", architectures=["LlamaForSequenceClassification"])
    config = make(critic__init_value_head=None, critic__load=str(reward_model))
    _write_tensor(reward_model, (1, 128))
    preflight(config)
    _write_tensor(reward_model, (2, 128))
    assert _refusal(config).startswith(f"{reward_model} scores 2 labels (score.weight), expected one")


def test_preflight_critic_from_a_checkpoint_reads_the_model_beside_its_weights(make: Make, tmp_path: Path) -> None:
    critic = tmp_path / "run" / "critic"
    config = make(critic__init_value_head=None, critic__load=str(critic))
    iteration = critic / "iter_0000020"
    iteration.mkdir(parents=True)
    latest = critic / "latest_checkpointed_iteration.txt"
    latest.write_text("20")
    assert f"{latest} names '20', but {iteration}/.metadata is not there" in _refusal(config)
    (iteration / ".metadata").touch()
    assert f"--critic-load {critic}: {iteration} is a torch_dist checkpoint without hf/config.json" in _refusal(config)
    write_model_folder(iteration / "hf", architectures=["LlamaForCausalLM"])
    assert "which holds no value head" in _refusal(config)
    preflight(make(critic__load=str(critic)))
    write_model_folder(iteration / "hf", architectures=["LlamaForSequenceClassification"], num_hidden_layers=2)
    (iteration / "hf" / "model.safetensors").unlink()
    for load in (critic, iteration):
        assert preflight(make(critic__init_value_head=None, critic__load=str(load))).critic.num_layers == 2
