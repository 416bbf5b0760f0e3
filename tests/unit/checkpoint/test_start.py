"""What --load is taken for, what a resumed run gets back, and everything that keeps one from resuming."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.checkpoint.start import ORDER_SETTINGS, StartPoint, check_role_folders_free, find_start, replaced_runs
from slime_ppo.config.fields import Value
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.data.row_format import RowFormat
from slime_ppo.data.source import PromptSource, RowPolicy
from slime_ppo.data.tokenizer import load_tokenizer
from slime_ppo.errors import CheckpointError, ConfigError, DataError, SlimePpoError
from slime_ppo.ppo_utils.kl_controller import AdaptiveKL
from slime_ppo.types.load_report import LoadReport
from tests.helpers.configs import make_config, write_model_folder
from tests.helpers.saved_runs import make_sample, make_saver, progress_after, same_samples
from tests.helpers.tiny_llama import make_tiny_llama
from tests.helpers.trainer_parts import CountingPrompts

Shapes = dict[RoleName, ModelShape]


@pytest.fixture
def shapes(tmp_path: Path) -> Shapes:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path / "model"))
    return {"actor": shape, "critic": shape}


@pytest.fixture
def run(tmp_path: Path, shapes: Shapes) -> Path:
    """The folder of a run that has saved after 2 and 4 rollouts of 8 prompts, the second time with samples that wait."""
    folder = tmp_path / "run"
    config = make_config(run__save=str(folder))
    saver = make_saver(config, shapes=shapes)
    saver.save(progress_after(config, 2, prompts={"drawn": 16}))
    saver.save(progress_after(config, 4, prompts={"drawn": 40}, samples=[make_sample(32, full=True)]))
    return folder


def loading(folder: Path, *, save: Path | None = None, **values: Value) -> Config:
    """A run of 10 rollouts that goes on where `folder` was, in the same folder or in `save`."""
    values = {"run__num_rollout": 10, "checkpoint__load": str(folder)} | values
    return make_config(run__save=str(save or folder), **values)


def start_of(config: Config, shapes: Shapes, prompts: CountingPrompts | None = None) -> StartPoint:
    return find_start(config, shapes, prompts or CountingPrompts())


def refusal(config: Config, shapes: Shapes, kind: type[SlimePpoError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        start_of(config, shapes)
    return str(caught.value)


# what it is


def test_find_start_without_load_begins(shapes: Shapes) -> None:
    start = start_of(make_config(), shapes)
    assert (start.progress.rollout_id, start.text, start.folders, start.resumed) == (0, "", {}, False)
    assert start.progress.prompts == {"drawn": 0}


def test_find_start_in_the_same_folder_without_a_checkpoint_begins_and_says_so(tmp_path: Path, shapes: Shapes) -> None:
    for folder in (tmp_path / "absent", tmp_path / "early"):
        start = start_of(loading(folder), shapes)
        assert start.text == f"--load {folder} holds no checkpoint yet: the run starts at its beginning"
        assert not start.resumed
        (tmp_path / "early" / "actor" / "iter_0000004.partial").mkdir(parents=True, exist_ok=True)
        (tmp_path / "early" / "metrics.jsonl").touch()


def test_find_start_from_another_folder_without_a_checkpoint_is_refused(tmp_path: Path, shapes: Shapes) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").touch()
    message = refusal(loading(tmp_path / "other", save=tmp_path / "new"), shapes)
    assert (
        "expected a run folder with a complete checkpoint (run_state.json), a torch_dist folder, or a Hugging Face folder"
        in message
    )
    assert message.endswith("found metrics.jsonl")
    assert refusal(loading(tmp_path / "none", save=tmp_path / "new"), shapes).endswith("found no such folder")


def test_find_start_from_a_hf_folder_takes_the_actors_weights_and_leaves_reference_and_critic(
    tmp_path: Path, shapes: Shapes
) -> None:
    folder = write_model_folder(tmp_path / "hf")
    start = start_of(loading(folder, save=tmp_path / "new"), shapes)
    config = start.config
    assert (config.model.hf_checkpoint, config.model.ref_folder, config.role("critic").hf_folder) == (str(folder), "model", "model")
    assert "is a Hugging Face folder: its weights only, for the actor" in start.told({})
    assert (start.resumed, start.folders, start.progress.rollout_id) == (False, {}, 0)


@pytest.mark.parametrize("part", ["actor", "actor/iter_0000002"])
def test_find_start_from_a_torch_dist_folder_takes_weights_only(run: Path, tmp_path: Path, shapes: Shapes, part: str) -> None:
    start = start_of(loading(run / part, save=tmp_path / "new"), shapes)
    chosen = run / "actor" / ("iter_0000004" if part == "actor" else "iter_0000002")
    assert (start.folders, start.resumed, start.progress.rollout_id) == ({"actor": chosen}, False, 0)
    assert f"{chosen} is a torch_dist folder: its weights only" in start.told({"actor": LoadReport(False, False)})


def test_find_start_from_a_torch_dist_folder_whose_list_names_another_is_refused(run: Path, tmp_path: Path, shapes: Shapes) -> None:
    (run / "actor" / "latest_checkpointed_iteration.txt").write_text("6\n")
    assert "names '6', but" in refusal(loading(run / "actor", save=tmp_path / "new"), shapes)


def test_find_start_from_the_critics_folder_for_the_actor_is_refused(run: Path, tmp_path: Path, shapes: Shapes) -> None:
    message = refusal(loading(run / "critic", save=tmp_path / "new"), shapes)
    assert "iter_0000004 holds the critic of a run, expected its actor" in message


def test_find_start_from_weights_that_are_also_save_is_refused(run: Path, tmp_path: Path, shapes: Shapes) -> None:
    assert "--save is the same" in refusal(loading(run / "actor"), shapes, ConfigError)
    assert "--save is the same" in refusal(loading(write_model_folder(tmp_path / "hf")), shapes, ConfigError)


# resuming


def test_find_start_from_a_run_folder_gets_everything_back(run: Path, shapes: Shapes) -> None:
    prompts = CountingPrompts()
    start = start_of(loading(run), shapes, prompts)
    progress = start.progress
    assert (progress.rollout_id, progress.version, progress.prompts, prompts.drawn) == (4, 4, {"drawn": 40}, 40)
    assert same_samples(progress.samples, [make_sample(32, full=True)])
    assert start.folders == {"actor": run / "actor/iter_0000004", "critic": run / "critic/iter_0000004"} and start.resumed
    assert [one.rollout_id for one in start.run_state.checkpoints] == [2, 4] and start.run_state.run_id == "run-1"
    assert start.told({"actor": LoadReport(True, True), "critic": LoadReport(True, False)}) == (
        f"resumed from {run} after 4 of 10 rollouts: weights and optimizer of actor and critic, place in the prompts, "
        "KL coefficient 0, weight version 4, 1 samples that wait for their training; "
        "new random states for the ranks of the critic, whose layout or kind of device is another"
    )


def test_find_start_into_another_folder_is_a_run_of_its_own_from_there_on(run: Path, tmp_path: Path, shapes: Shapes) -> None:
    start = start_of(loading(run, save=tmp_path / "new", checkpoint__ckpt_step=2), shapes)
    assert (start.progress.rollout_id, start.progress.samples, start.records) == (2, (), run)
    assert start.run_state.checkpoints == () and start.run_state.run_id != "run-1"


def test_find_start_in_a_folder_that_was_moved_resumes(run: Path, tmp_path: Path, shapes: Shapes) -> None:
    moved = tmp_path / "moved"
    run.rename(moved)
    assert start_of(loading(moved), shapes).folders["critic"] == moved / "critic/iter_0000004"


def test_find_start_at_an_earlier_checkpoint_in_place_needs_overwrite(run: Path, shapes: Shapes) -> None:
    message = refusal(loading(run, checkpoint__ckpt_step=2), shapes, ConfigError)
    assert message.startswith("--ckpt-step 2 in the same folder gives up the later checkpoints (4)")
    start = start_of(loading(run, checkpoint__ckpt_step=2, run__overwrite=True), shapes)
    assert [one.rollout_id for one in start.run_state.checkpoints] == [2]


def test_find_start_with_a_step_that_is_not_kept_lists_those_that_are(run: Path, shapes: Shapes) -> None:
    message = refusal(loading(run, checkpoint__ckpt_step=3), shapes)
    assert message.endswith("has no checkpoint after 3 rollouts (--ckpt-step); run_state.json lists: 2, 4")


def test_find_start_adaptive_beta_goes_on_and_a_fixed_one_is_the_configs(tmp_path: Path, shapes: Shapes) -> None:
    adaptive: dict[str, Value] = {
        "ppo__kl_controller": "adaptive",
        "ppo__kl_coef": 0.1,
        "ppo__kl_target": 1.0,
        "ppo__kl_horizon": 64.0,
    }
    config = make_config(run__save=str(tmp_path / "run"), **adaptive)
    saver = make_saver(config, shapes=shapes)
    saver.save(replace(progress_after(config, 2, prompts={"drawn": 16}), kl=AdaptiveKL(0.125, target=1.0, horizon=64.0)))
    assert start_of(loading(tmp_path / "run", **adaptive), shapes).progress.kl == AdaptiveKL(0.125, target=1.0, horizon=64.0)
    assert start_of(loading(tmp_path / "run", ppo__kl_coef=0.3), shapes).progress.kl.beta == 0.3


def test_find_start_tells_the_options_that_have_changed(run: Path, shapes: Shapes) -> None:
    changed = start_of(loading(run, optimizer__lr=1e-5, run__overwrite=True), shapes).changes
    assert changed == ("--num-rollout was 25, is 10", "--lr was 1e-06, is 1e-05")


# what keeps a run from resuming


def test_find_start_with_nothing_left_to_do_names_num_rollout(run: Path, shapes: Shapes) -> None:
    told = f"nothing is left to do: {run} has done 4 of --num-rollout 4, which counts the whole run. Raise --num-rollout to go on"
    killed_in_its_export = refusal(loading(run, run__num_rollout=4), shapes, ConfigError)
    tool = f"python tools/convert_torch_dist_to_hf.py {run}/actor/iter_0000004 {run}/hf"
    assert killed_in_its_export == f"{told}. It has no hf folder yet: {tool}"
    (run / "hf").mkdir()
    assert refusal(loading(run, run__num_rollout=4), shapes, ConfigError) == told


def test_find_start_with_any_option_that_decides_the_order_of_samples_is_refused(run: Path, shapes: Shapes) -> None:
    changes: dict[str, tuple[Value, str]] = {
        "run.seed": (7, "--seed was 0, is 7"),
        "data.input_key": ("question", "--input-key was prompt, is question"),
        "data.label_key": ("answer", "--label-key was null, is answer"),
        "data.tool_key": ("tools", "--tool-key was null, is tools"),
        "data.apply_chat_template_kwargs": ('{"a": 1}', '--apply-chat-template-kwargs was null, is {"a": 1}'),
        "rollout.rollout_batch_size": (64, "--rollout-batch-size was 128, is 64"),
        "rollout.n_samples_per_prompt": (2, "--n-samples-per-prompt was 1, is 2"),
        "batch.global_batch_size": (4, "--global-batch-size was 128, is 4"),
        "batch.partial_step": ("drop", "--partial-step was spread, is drop"),
        "ppo.num_epochs_per_rollout": (3, "--num-epochs-per-rollout was 1, is 3"),
        "ppo.num_critic_only_steps": (1, "--num-critic-only-steps was 0, is 1"),
    }
    assert changes.keys() == set(ORDER_SETTINGS)
    for option, (value, told) in changes.items():
        message = refusal(loading(run, **{option.replace(".", "__"): value}), shapes)
        assert "decide which samples come when" in message and told in message


def test_find_start_with_other_roles_is_refused(run: Path, shapes: Shapes) -> None:
    message = refusal(loading(run, ppo__advantage_estimator="grpo"), shapes)
    assert message.startswith("the checkpoint holds actor and critic, the run trains actor (--advantage-estimator grpo)")


@pytest.mark.parametrize(("role", "flag"), [("actor", "--hf-checkpoint"), ("critic", "--critic-load")])
def test_find_start_with_another_model_names_what_differs(run: Path, shapes: Shapes, role: RoleName, flag: str) -> None:
    other = shapes | {role: replace(shapes[role], num_layers=5)}
    message = refusal(loading(run), other)
    assert (
        message.startswith(f"the {role} is another model than in the checkpoint: num_layers was 4 and is 5 now") and flag in message
    )


def test_find_start_with_another_prompt_file_is_refused(tmp_path: Path, shapes: Shapes) -> None:
    tokenizer = load_tokenizer(str(make_tiny_llama(tmp_path / "tiny")))
    path = tmp_path / "prompts.jsonl"

    def source(words: str) -> PromptSource:
        path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
        return PromptSource(str(path), tokenizer, row_format=RowFormat("prompt"), policy=RowPolicy(8), shuffle=True, seed=0)

    prompts = source("abcd")
    prompts.next_prompts(3)
    config = make_config(run__save=str(tmp_path / "run"))
    make_saver(config, shapes=shapes).save(progress_after(config, 2, prompts=prompts.state_dict()))
    again = source("abcd")
    find_start(loading(tmp_path / "run"), shapes, again)
    assert [one.text for one in again.next_prompts(3)] == [one.text for one in prompts.next_prompts(3)]
    with pytest.raises(DataError, match=r"does not fit .*prompts.jsonl .*fingerprint was"):
        find_start(loading(tmp_path / "run"), shapes, source("abce"))


Harm = Callable[[Path], None]


def cut(name: str) -> Harm:
    def harm(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])

    return harm


def removed(name: str) -> Harm:
    def harm(run: Path) -> None:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    return harm


def edited(name: str, old: str, new: str) -> Harm:
    def harm(run: Path) -> None:
        text = (run / name).read_text(encoding="utf-8")
        assert old in text
        (run / name).write_text(text.replace(old, new), encoding="utf-8")

    return harm


STATE = "rollout/state_0000004_buffered.json"


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (cut("critic/iter_0000004/__0_0.distcp"), "critic/iter_0000004/__0_0.distcp has 9 bytes, 19 were written"),
        (removed("actor/iter_0000004/.metadata"), "actor/iter_0000004/.metadata is missing"),
        (removed("critic/iter_0000004"), "critic/iter_0000004 is not there"),
        (cut("rollout/buffer_0000004.npz"), "rollout/buffer_0000004.npz has"),
        (
            edited("critic/iter_0000004/slime_ppo.json", '"rollout_id": 4', '"rollout_id": 2'),
            "holds the critic after 2 rollouts, expected the critic after 4",
        ),
        (edited(STATE, '"run.seed": 0', '"run.seed": 1'), f"{STATE} is not as it was written"),
        (cut(STATE), f"{STATE} is not as it was written"),
        (removed(STATE), f"{STATE} cannot be read: No such file"),
    ],
)
def test_find_start_with_a_damaged_checkpoint_names_the_file_and_an_earlier_one_is_intact(
    run: Path, tmp_path: Path, shapes: Shapes, harm: Harm, named: str
) -> None:
    harm(run)
    assert named in refusal(loading(run), shapes)
    assert start_of(loading(run, save=tmp_path / "new", checkpoint__ckpt_step=2), shapes).progress.rollout_id == 2


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (cut("run_state.json"), "run_state.json is not whole JSON"),
        (edited("run_state.json", '"state_file"', '"stat_file"'), "run_state.json has not the entries it was written with"),
        (edited("run_state.json", '"format": 1', '"format": 2'), "has format 2, this version reads 1"),
    ],
)
def test_find_start_with_a_damaged_list_of_checkpoints_names_it(run: Path, shapes: Shapes, harm: Harm, named: str) -> None:
    harm(run)
    assert named in refusal(loading(run), shapes)


def test_find_start_with_a_damaged_checkpoint_tells_the_way_to_the_earlier_one(run: Path, shapes: Shapes) -> None:
    (run / "actor/iter_0000004/__0_0.distcp").unlink()
    message = refusal(loading(run), shapes)
    assert f"the checkpoint after 4 rollouts in {run} is damaged:" in message
    assert message.endswith("Go on from another one with --ckpt-step 2")


# folders that another run saves into


def foreign(folder: Path, owner: str, advice: str) -> str:
    """The refusal of the critics of another run in `folder`, as a pattern."""
    text = f"{folder} already holds checkpoints (iter_0000002, iter_0000004) of {owner}, not of this run's critic. Choose another "
    return re.escape(text + advice)


def overwriting(config: Config) -> Config:
    return replace(config, run=replace(config.run, overwrite=True))


ONLY_BY_HAND = "folder, or move them away: --overwrite speaks of --save only"


@pytest.mark.parametrize("overwrite", [False, True])
def test_check_role_folders_free_refuses_the_checkpoints_of_another_run(
    run: Path, tmp_path: Path, shapes: Shapes, overwrite: bool
) -> None:
    config = make_config(run__save=str(tmp_path / "second"), critic__save=str(run / "critic"), run__overwrite=overwrite)
    start = start_of(config, shapes)
    with pytest.raises(ConfigError, match=foreign(run / "critic", f"run run-1 in {run}", ONLY_BY_HAND)):
        check_role_folders_free(config, start.run_state)
    check_role_folders_free(loading(run), start_of(loading(run), shapes).run_state)


def test_check_role_folders_free_with_overwrite_gives_up_the_run_in_save_and_its_critics_elsewhere(
    tmp_path: Path, shapes: Shapes
) -> None:
    critics = tmp_path / "critics"
    config = make_config(run__save=str(tmp_path / "run"), critic__save=str(critics))
    saver = make_saver(config, shapes=shapes)
    for number in (2, 4):
        saver.save(progress_after(config, number, prompts={"drawn": 16}))
    with pytest.raises(ConfigError, match=r"actor already holds checkpoints .* of run run-1 in .*Choose .*, or say --overwrite"):
        check_role_folders_free(config, RunState("new"))
    again = overwriting(config)
    assert replaced_runs(config) == frozenset() and replaced_runs(again) == {"run-1"}
    check_role_folders_free(again, RunState("new"))
    # a copy of the run folder shares its critics, and neither run may delete those of the other
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    for values in ({"run__overwrite": True}, {"run__overwrite": True, "checkpoint__load": str(copy)}):
        config = make_config(run__save=str(copy), critic__save=str(critics), **values)
        with pytest.raises(ConfigError, match=foreign(critics, f"run run-1 in {tmp_path}/run", ONLY_BY_HAND)):
            check_role_folders_free(config, RunState("new"))
    shutil.rmtree(tmp_path / "run")  # so that the copy is the run
    check_role_folders_free(config, RunState("new"))


def test_check_role_folders_free_with_overwrite_gives_up_critics_that_a_run_without_one_has_left_in_save(
    run: Path, tmp_path: Path, shapes: Shapes
) -> None:
    without = overwriting(make_config(run__save=str(run), ppo__advantage_estimator="grpo"))
    saver = make_saver(without, shapes=shapes, state=RunState("run-2"))
    saver.plan = replace(saver.plan, replaced_runs=replaced_runs(without))
    saver.save(progress_after(without, 2, prompts={"drawn": 16}))
    assert [path.name for path in (run / "actor").glob("iter_*")] == ["iter_0000002"]
    config = make_config(run__save=str(run))
    with pytest.raises(ConfigError, match="actor already holds"):
        check_role_folders_free(config, RunState("new"))
    check_role_folders_free(overwriting(config), RunState("new"))
    elsewhere = make_config(run__save=str(tmp_path / "b"), critic__save=str(run / "critic"), run__overwrite=True)
    with pytest.raises(ConfigError, match="of run run-1"):
        check_role_folders_free(elsewhere, RunState("new"))


def test_check_role_folders_free_takes_checkpoints_that_name_no_run_for_another_ones(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        (tmp_path / role / "iter_0000002").mkdir(parents=True)
    config = make_config(run__save=str(tmp_path))
    with pytest.raises(ConfigError, match="actor already holds checkpoints .* of a run that they do not name.*or say --overwrite"):
        check_role_folders_free(config, RunState("new"))
    with pytest.raises(ConfigError, match="critic already holds checkpoints .* of a run that they do not name.*or move them away"):
        check_role_folders_free(overwriting(config), RunState("new"))


def test_run_of_the_other_script_is_refused_and_its_weights_are_named(run: Path, shapes: Shapes) -> None:
    text = refusal(replace(loading(run), objective="sft"), shapes)
    assert "is one of scripts/train_ppo.py, and only that goes on with it" in text
    assert f"--load {run}/actor/iter_0000004" in text


@pytest.mark.parametrize("resumes", [False, True])
def test_check_role_folders_free_refuses_another_runs_critics_in_a_folder_that_goes_on(
    run: Path, tmp_path: Path, shapes: Shapes, resumes: bool
) -> None:
    second = tmp_path / "second"
    if resumes:
        own = make_saver(make_config(run__save=str(second)), shapes=shapes, state=RunState("run-2"))
        own.save(progress_after(make_config(), 2, prompts={"drawn": 16}))
    config = loading(second, critic__save=str(run / "critic"))
    start = start_of(config, shapes)
    assert start.resumed == resumes
    for one in (config, overwriting(config)):
        with pytest.raises(ConfigError, match=foreign(run / "critic", f"run run-1 in {run}", ONLY_BY_HAND)):
            check_role_folders_free(one, start.run_state)


def test_check_role_folders_free_refuses_the_critics_of_a_copy_that_was_moved(tmp_path: Path, shapes: Shapes) -> None:
    config, copied = (
        loading(tmp_path / name, critic__save=str(tmp_path / "critics"), run__num_rollout=9) for name in ("run", "copy")
    )
    make_saver(config, shapes=shapes).save(progress_after(config, 2, prompts={"drawn": 16}))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    saver = make_saver(copied, shapes=shapes, state=RunState.read(tmp_path / "copy"))
    saver.save(progress_after(copied, 4, prompts={"drawn": 32}))
    (tmp_path / "copy").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=rf"critics already holds checkpoints .iter_0000004. of run run-1 in {tmp_path}/copy"):
        check_role_folders_free(config, start_of(config, shapes).run_state)
    moved = loading(tmp_path / "moved", critic__save=str(tmp_path / "critics"), run__num_rollout=9)
    check_role_folders_free(moved, start_of(moved, shapes).run_state)


@pytest.mark.parametrize("resumes", [False, True])
def test_check_role_folders_free_takes_what_a_killed_run_has_left_for_its_own(
    tmp_path: Path, shapes: Shapes, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    config = loading(tmp_path / "run", critic__save=str(tmp_path / "critics"))
    saver = make_saver(config, shapes=shapes, state=RunState("killed"))
    if resumes:
        saver.save(progress_after(config, 2, prompts={"drawn": 16}))

    def kill(state: RunState, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunState, "write", kill)
        saver.save(progress_after(config, 4, prompts={"drawn": 32}))
    assert (tmp_path / "critics" / "iter_0000004").exists()
    start = start_of(config, shapes)
    assert start.progress.rollout_id == (2 if resumes else 0)
    check_role_folders_free(config, start.run_state)


def test_check_role_folders_free_refuses_to_begin_anew_over_checkpoints_whose_list_is_lost(run: Path, shapes: Shapes) -> None:
    (run / "run_state.json").unlink()
    config = loading(run)
    with pytest.raises(
        ConfigError, match=r"has no run_state.json.*iter_0000002, iter_0000004: the run would begin anew and delete"
    ):
        check_role_folders_free(config, start_of(config, shapes).run_state)
