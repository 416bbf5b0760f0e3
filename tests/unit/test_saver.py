"""What a save writes in which order, what stays when it fails, and what is deleted when."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.checkpoint import files
from slime_ppo.checkpoint.layout import IDENTITY_FILE
from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.checkpoint.start import check_role_folders_free, replaced_paths, replaced_runs
from slime_ppo.config.fields import Value
from slime_ppo.config.root import Config
from slime_ppo.errors import CheckpointError
from slime_ppo.saver import CheckpointSaver
from tests.helpers.configs import make_config
from tests.helpers.saved_runs import make_sample, make_saver, progress_after
from tests.helpers.trainer_parts import Journal

PROMPTS = {"epoch": 0, "position": 8}


def config_in(folder: Path, **values: Value) -> Config:
    return make_config(run__save=str(folder), **values)


def save(saver: CheckpointSaver, config: Config, rollout_id: int, *, buffered: bool = False, in_background: bool = False) -> None:
    samples = [make_sample(0, full=True)] if buffered else []
    saver.save(progress_after(config, rollout_id, prompts=PROMPTS, samples=samples), in_background=in_background)


def listed(folder: Path) -> list[int]:
    """What run_state.json says, and what a resume would find."""
    state = RunState.read(folder)
    return [] if state is None else [one.rollout_id for one in state.checkpoints]


def on_disk(folder: Path) -> list[str]:
    """Checkpoints in the folder of the actor and of the critic, and the states."""
    return sorted(
        str(path.relative_to(folder))
        for part in ("actor", "critic", "rollout")
        for path in (folder / part).iterdir()
        if path.is_dir() or part == "rollout"
    )


# order and publication


def test_save_writes_actor_critic_state_and_lists_it_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal: Journal = []
    config = config_in(tmp_path)
    saver = make_saver(config, journal=journal)
    rename, replace = os.rename, os.replace
    monkeypatch.setattr(os, "rename", lambda a, b: (journal.append(f"rename to {Path(b).relative_to(tmp_path)}"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (journal.append(f"publish {Path(b).relative_to(tmp_path)}"), replace(a, b)))
    save(saver, config, 20)
    assert journal == [
        *("take actor", "save actor as iter_0000020.partial", "take critic", "save critic as iter_0000020.partial"),
        *("finish actor", "finish critic"),
        *("publish actor/iter_0000020.partial/slime_ppo.json", "rename to actor/iter_0000020"),
        *("publish critic/iter_0000020.partial/slime_ppo.json", "rename to critic/iter_0000020"),
        *("publish rollout/state_0000020.json", "publish run_state.json"),
        *("publish actor/latest_checkpointed_iteration.txt", "publish critic/latest_checkpointed_iteration.txt"),
    ]
    assert (tmp_path / "actor" / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert listed(tmp_path) == [20]


def test_save_without_a_critic_writes_no_critic(tmp_path: Path) -> None:
    config = config_in(tmp_path, ppo__advantage_estimator="grpo")
    save(make_saver(config), config, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor", "rollout", "run_state.json"]


def test_save_in_background_counts_from_the_next_safe_point_on(tmp_path: Path) -> None:
    journal: Journal = []
    config = config_in(tmp_path)
    saver = make_saver(config, journal=journal)
    save(saver, config, 2, in_background=True)
    assert journal[1] == "save actor as iter_0000002.partial in the background" and "finish actor" not in journal
    assert listed(tmp_path) == []
    saver.publish()
    assert listed(tmp_path) == [2] and journal[-2:] == ["finish actor", "finish critic"]
    saver.publish()
    assert journal.count("finish actor") == 1


def test_save_in_background_is_published_before_the_next_save_begins(tmp_path: Path) -> None:
    journal: Journal = []
    config = config_in(tmp_path)
    saver = make_saver(config, journal=journal)
    save(saver, config, 2, in_background=True)
    save(saver, config, 4)
    assert journal.index("finish critic") < journal.index("save actor as iter_0000004.partial")
    assert listed(tmp_path) == [2, 4]


def test_save_in_background_keeps_the_state_of_its_moment(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    saver = make_saver(config)
    progress = progress_after(config, 2, prompts=PROMPTS)
    saver.save(progress, in_background=True)
    progress.skipped_in_a_row["actor"] = 5
    progress.has_trained()
    saver.publish()
    state = files.read_json(tmp_path / "rollout" / "state_0000002.json")["progress"]
    assert (state["rollout_id"], state["skipped_in_a_row"]["actor"]) == (2, 0)


def test_save_of_the_same_rollout_again_does_nothing_or_adds_the_samples(tmp_path: Path) -> None:
    journal: Journal = []
    config = config_in(tmp_path)
    saver = make_saver(config, journal=journal)
    save(saver, config, 3)
    asked = len(journal)
    save(saver, config, 3)
    save(saver, config, 3, buffered=True)
    assert len(journal) == asked, "the weights are saved already"
    assert listed(tmp_path) == [3]
    assert on_disk(tmp_path)[2:] == ["rollout/buffer_0000003.npz", "rollout/state_0000003_buffered.json"]


@pytest.mark.parametrize(("interval", "due"), [(2, [2, 4, 6]), (1, [1, 2, 3, 4, 5, 6]), (None, [])])
def test_is_due_every_so_many_rollouts_or_never(tmp_path: Path, interval: int | None, due: list[int]) -> None:
    saver = make_saver(config_in(tmp_path, checkpoint__save_interval=interval))
    assert [rollout_id for rollout_id in range(1, 7) if saver.is_due(rollout_id)] == due


# retention


def test_save_keeps_the_newest_and_deletes_only_after_the_new_one_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, checkpoint__keep_checkpoints=1)
    saver = make_saver(config)
    save(saver, config, 1)
    at_publication: list[list[str]] = []
    write = RunState.write
    monkeypatch.setattr(RunState, "write", lambda state, folder: (at_publication.append(on_disk(tmp_path)), write(state, folder)))
    save(saver, config, 2)
    assert "actor/iter_0000001" in at_publication[0] and "rollout/state_0000001.json" in at_publication[0]
    assert listed(tmp_path) == [2]
    assert on_disk(tmp_path) == ["actor/iter_0000002", "critic/iter_0000002", "rollout/state_0000002.json"]


def test_save_keeps_all_with_keep_checkpoints_null(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__keep_checkpoints=None)
    saver = make_saver(config)
    for number in (1, 2, 3):
        save(saver, config, number)
    assert listed(tmp_path) == [1, 2, 3]


def test_save_deletes_what_a_killed_run_left_half_done_and_nothing_else(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    for name in ("actor/iter_0000007.partial", "critic/iter_0000007", "actor/notes", "rollout/dumps", "critic/hf"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "critic/iter_0000007/slime_ppo.json").write_text('{"run_id": "run-1"}')
    (tmp_path / "rollout" / "state_0000007.json.new").touch()
    save(make_saver(config), config, 8)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert {"actor/notes", "rollout/dumps", "critic/hf"} <= left
    assert not [name for name in left if "0000007" in name]


def test_save_deletes_the_checkpoints_of_runs_that_it_replaces_and_never_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run has come into the critic's folder since this one began, on a disk without locks."""
    config = config_in(tmp_path, critic__save=str(tmp_path / "critics"))
    for home, number, run_id in (("run", 5, "replaced"), ("other", 6, "another"), ("run", 7, "killed")):
        before = config_in(tmp_path / home, critic__save=str(tmp_path / "critics"))
        save(make_saver(before, state=RunState(run_id)), before, number)
    (tmp_path / "critics" / "iter_0000008").mkdir()  # does not say whose it is
    config = config_in(tmp_path / "run", critic__save=str(tmp_path / "critics"))
    saver = make_saver(config)
    saver.plan = replace(saver.plan, replaced_runs=frozenset({"replaced", "killed"}))
    deleted: list[str] = []
    monkeypatch.setattr("slime_ppo.saver._remove", lambda path: deleted.append(str(path.relative_to(tmp_path))))
    save(saver, config, 9)
    assert sorted(deleted[:2]) == ["critics/iter_0000005", "critics/iter_0000007"], "the actor's tell which runs there were"
    assert sorted(deleted[2:4]) == ["run/actor/iter_0000005", "run/actor/iter_0000007"]
    assert not [name for name in deleted[4:] if "iter_" in name]


@pytest.mark.parametrize("again", [False, True])
def test_run_killed_in_the_deletion_of_a_checkpoint_goes_on_and_deletes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Of one that is listed no more, or, with `again`, of what an earlier kill has left where the new one is published."""
    config = config_in(tmp_path, checkpoint__keep_checkpoints=1, checkpoint__load=str(tmp_path))
    save(make_saver(config), config, 2)
    if again:
        for role in ("actor", "critic"):
            shutil.copytree(tmp_path / role / "iter_0000002", tmp_path / role / "iter_0000003")
    unlink = os.unlink

    def kill(path: str | Path, **named: Any) -> None:
        unlink(path, **named)
        if Path(path).name == IDENTITY_FILE:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "unlink", kill)
        save(make_saver(config, state=RunState.read(tmp_path)), config, 3)
    state = RunState.read(tmp_path)
    assert state is not None and listed(tmp_path) == [2 if again else 3]
    check_role_folders_free(config, state)
    save(make_saver(config, state=state), config, 4)
    assert [name for name in on_disk(tmp_path) if "iter" in name] == ["actor/iter_0000004", "critic/iter_0000004"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_save_beside_a_copy_that_was_moved_deletes_what_its_own_list_held_and_no_more(tmp_path: Path, overwrite: bool) -> None:
    """Run folder and copy are one run by name, and share the critics' folder. The moved copy goes on, or is given up for a run."""
    critics, run, copy, moved = (tmp_path / name for name in ("critics", "run", "copy", "moved"))

    def save_in(folder: Path, number: int) -> None:
        config = config_in(folder, critic__save=str(critics), checkpoint__keep_checkpoints=1)
        save(make_saver(config, state=RunState.read(folder)), config, number)

    save_in(run, 2)
    shutil.copytree(run, copy)
    save_in(copy, 4)
    copy.rename(moved)
    save_in(run, 6)
    assert {path.name for path in critics.glob("iter_*")} == {"iter_0000004", "iter_0000006"}
    config = config_in(moved, critic__save=str(critics), checkpoint__keep_checkpoints=1, run__overwrite=overwrite)
    saver = make_saver(config, state=RunState("new") if overwrite else RunState.read(moved))
    saver.plan = replace(saver.plan, replaced_runs=replaced_runs(config), replaced_paths=replaced_paths(config))
    save(saver, config, 8)
    assert {path.name for path in critics.glob("iter_*")} == {"iter_0000006", "iter_0000008"}


def test_save_over_what_a_killed_run_has_left_of_the_same_rollout_replaces_it(tmp_path: Path) -> None:
    """The actor's folder, which it has renamed already, and the critic's, which it has not."""
    config = config_in(tmp_path)
    for name in ("actor/iter_0000004", "critic/iter_0000004.partial"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "old.distcp").touch()
    save(make_saver(config), config, 4)
    assert listed(tmp_path) == [4] and not list(tmp_path.rglob("old.distcp"))
    assert len(list(tmp_path.rglob("__0_0.distcp"))) == 2


# failures


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_save_on_a_full_disk_leaves_the_earlier_checkpoint_and_gives_back_the_room(small_disk: Path) -> None:
    config = config_in(small_disk)
    saver = make_saver(config)
    save(saver, config, 1)
    blocks = os.statvfs(small_disk).f_bavail
    with (small_disk / "ballast").open("wb") as file:  # but for one block: the ranks' first file fits
        file.write(b"x" * (blocks - 1) * os.statvfs(small_disk).f_bsize)
    with pytest.raises(
        CheckpointError, match=r"after 2 rollouts could not be saved: .*No space left.*after 1 rollouts is whole: go on"
    ):
        save(saver, config, 2)
    assert listed(small_disk) == [1]
    assert on_disk(small_disk) == ["actor/iter_0000001", "critic/iter_0000001", "rollout/state_0000001.json"]
    (small_disk / "ballast").unlink()
    save(saver, config, 2)
    assert listed(small_disk) == [1, 2]


def test_save_on_a_read_only_file_system_leaves_the_earlier_checkpoint(small_disk: Path) -> None:
    config = config_in(small_disk)
    saver = make_saver(config)
    save(saver, config, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        CheckpointError, match="after 2 rollouts could not be saved: .*Read-only file system.*after 1 rollouts is whole"
    ):
        save(saver, config, 2)
    assert listed(small_disk) == [1]


def test_save_whose_list_cannot_be_written_takes_back_what_was_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    saver = make_saver(config)
    save(saver, config, 1)

    def full(state: RunState, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "run_state.json"))

    monkeypatch.setattr(RunState, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(saver, config, 2)
    assert listed(tmp_path) == [1]
    assert "actor/iter_0000002" not in on_disk(tmp_path)
    assert [(tmp_path / role / "latest_checkpointed_iteration.txt").read_text() for role in ("actor", "critic")] == ["1", "1"]


def test_save_that_the_ranks_cannot_write_says_so_and_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    saver = make_saver(config)

    def fail() -> None:
        raise CheckpointError("rank 1: disk quota exceeded")

    monkeypatch.setattr(saver._groups["critic"], "finish_save", fail)
    with pytest.raises(
        CheckpointError, match="after 1 rollouts could not be saved: rank 1: disk quota exceeded. There is none of before"
    ):
        save(saver, config, 1)
    assert listed(tmp_path) == [] and on_disk_of_actor(tmp_path) == []


@pytest.mark.parametrize("step", ["critic save_checkpoint", "actor finish_save", "critic finish_save"])
def test_save_in_background_that_fails_half_way_is_given_up_when_no_rank_writes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    config = config_in(tmp_path)
    saver = make_saver(config)
    save(saver, config, 1)
    role, method = step.split()
    groups: Any = saver._groups
    original = getattr(groups[role], method)

    def fail(*arguments: object, **named: object) -> None:
        if method == "finish_save":
            original()
        monkeypatch.undo()
        raise CheckpointError("rank 1: disk quota exceeded")

    monkeypatch.setattr(groups[role], method, fail)
    with pytest.raises(CheckpointError, match="after 2 rollouts could not be saved: rank 1: disk quota exceeded"):
        save(saver, config, 2, in_background=True)
        saver.publish()
    assert [group.writes_in for group in groups.values()] == [None, None], "a rank would write into a folder that is gone"
    assert on_disk(tmp_path) == ["actor/iter_0000001", "critic/iter_0000001", "rollout/state_0000001.json"]
    save(saver, config, 3)
    assert listed(tmp_path) == [1, 3]


def on_disk_of_actor(folder: Path) -> list[str]:
    return [path.name for path in (folder / "actor").iterdir()]


def test_save_that_the_driver_cannot_see_asks_for_a_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    saver = make_saver(config)
    monkeypatch.setattr(saver._groups["actor"], "save_checkpoint", lambda folder, in_background: None)
    with pytest.raises(CheckpointError, match="is empty where the driver runs.*must be the same one on all nodes"):
        save(saver, config, 1)
