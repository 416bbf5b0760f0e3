"""Who gets into a run folder, who is kept out, and what is left in it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_ppo.checkpoint.lock import LOCK_FILE, FolderLocks
from slime_ppo.config.launcher import RankPlace
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError, SlimePpoError
from slime_ppo.launch import run_job
from slime_ppo.orchestration.interrupts import Interrupted
from slime_ppo.orchestration.local_world import LocalWorld
from tests.helpers.configs import make_config
from tests.helpers.tiny_llama import make_tiny_llama

# holds the folder, and has a forked child that outlives it: one more than a run has
HOLDER = """
import os, sys, time
from pathlib import Path
from slime_ppo.checkpoint.lock import FolderLocks
with FolderLocks({"--save": Path(sys.argv[1])}) as locks:
    locks.claim()
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def locks_of(*folders: Path) -> FolderLocks:
    return FolderLocks(dict(zip(("--save", "--critic-save"), folders, strict=False)))


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed <tmp_path>/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_second_run_is_refused_while_the_first_lives_and_begins_at_once_when_it_was_killed(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    run, critics = tmp_path / "run", tmp_path / "critics"
    critics.mkdir()
    said = (run / LOCK_FILE).read_bytes()
    for folders, flag in (((run,), "--save"), ((critics, run), "--critic-save")):
        with pytest.raises(ConfigError, match=f"{flag} {run}: another run writes there .process {holder.pid} on .*, since 20"):
            locks_of(*folders).__enter__()
    assert (run / LOCK_FILE).read_bytes() == said and list(critics.iterdir()) == []
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locks_of(run) as locks:
        locks.claim()
        assert f'"pid": {os.getpid()}' in (run / LOCK_FILE).read_text()


def test_run_that_is_refused_leaves_nothing_that_was_not_there(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    with pytest.raises(ConfigError, match="later"), locks_of(old, new):
        assert (old / LOCK_FILE).exists() and not new.exists()
        raise ConfigError("found later")
    assert list(tmp_path.iterdir()) == [old] and list(old.iterdir()) == []


def test_run_that_begins_leaves_its_files_and_the_next_one_takes_them(tmp_path: Path) -> None:
    folders = tmp_path / "run", tmp_path / "run" / "critic"
    for _ in range(2):
        with locks_of(*folders) as locks:
            locks.claim()
    assert all((folder / LOCK_FILE).exists() for folder in folders) and locks.warnings == []


def test_folder_that_another_run_has_made_meanwhile_is_refused(tmp_path: Path) -> None:
    first, second = locks_of(tmp_path / "run"), locks_of(tmp_path / "run")
    with first, second:
        first.claim()
        with pytest.raises(ConfigError, match=f"--save {tmp_path}/run: another run has begun there while this one read its inputs"):
            second.claim()
    assert (tmp_path / "run" / LOCK_FILE).exists()


def test_folder_that_a_link_names_is_made_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "emptied")
    with locks_of(tmp_path / "run") as locks:
        locks.claim()
    assert (tmp_path / "disk" / "emptied" / LOCK_FILE).exists()


def test_lock_whose_file_is_deleted_by_its_last_holder_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lockf = tmp_path / LOCK_FILE, fcntl.lockf

    def deleted_first(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "lockf", lockf)
        path.unlink()
        lockf(handle, operation)

    monkeypatch.setattr(fcntl, "lockf", deleted_first)
    with locks_of(tmp_path) as locks:
        locks.claim()
        assert f'"pid": {os.getpid()}' in path.read_text()


def test_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with locks_of(tmp_path) as locks:
        locks.claim()
        assert [line.split(": ")[1] for line in locks.warnings] == [
            "its file system has no locks, so nothing keeps a second run out of it"
        ]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=f"--save {tmp_path}: cannot write there .Is a directory.. Choose a folder you can"):
        locks_of(tmp_path).__enter__()
    (tmp_path / "file").touch()
    with locks_of(tmp_path / "file" / "run") as locks, pytest.raises(ConfigError, match="cannot write there .Not a directory"):
        locks.claim()


# the run that takes them


def test_run_job_is_refused_before_it_reads_anything(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    config = make_config(run__save=str(tmp_path / "run"), model__hf_checkpoint="nowhere")
    with pytest.raises(ConfigError, match=f"another run writes there .process {holder.pid}"):
        run_job(config, "local", LocalWorld(RankPlace()))


def test_run_job_that_finds_a_wrong_input_makes_no_folder(tmp_path: Path) -> None:
    config = make_config(run__save=str(tmp_path / "run"), model__hf_checkpoint="nowhere")
    with pytest.raises(ConfigError, match="no such folder"):
        run_job(config, "local", LocalWorld(RankPlace()))
    assert list(tmp_path.iterdir()) == []


class Breaking:
    """Inputs of a run that breaks off when it begins."""

    def __init__(self, config: Config, error: BaseException) -> None:
        self.start, self.rewards, self.error = SimpleNamespace(config=config), self, error
        self.reward_warnings = self.left_out = ()

    def __enter__(self) -> Any:
        return SimpleNamespace(start=self.fail)

    def __exit__(self, *_: object) -> None:
        return None

    def fail(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.mark.parametrize("begins", [False, True])
def test_run_job_says_truly_what_is_left_of_a_run_that_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], begins: bool
) -> None:
    config = make_config(run__save=str(tmp_path / "run"))

    def run_with(error: BaseException) -> int:
        broken = Breaking(config, error)
        monkeypatch.setattr("slime_ppo.launch.open_logs", lambda _: None)
        monkeypatch.setattr("slime_ppo.launch.read_inputs", (lambda *_, **__: broken) if begins else broken.fail)
        return run_job(config, "local", LocalWorld(RankPlace()))

    place = f"in {tmp_path}/run/logs/driver.log" if begins else "above"
    with pytest.raises(SlimePpoError, match=f"KeyError: 'a fault'. The traceback is {place}$"):
        run_with(KeyError("a fault"))
    assert run_with(Interrupted(signal.SIGINT)) == 130
    rest = f"the run folder is {tmp_path}/run" if begins else "the run had not begun"
    assert capsys.readouterr().out == f"stopped by SIGINT in start-up; {rest}\n"


def test_run_job_has_the_folders_of_run_and_critic_before_it_writes_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    critics = tmp_path / "critics"
    config = make_config(
        model__hf_checkpoint=str(make_tiny_llama(tmp_path / "model")),
        data__prompt_data=str(tmp_path / "prompts.jsonl"),
        data__rollout_max_prompt_len=8,
        run__save=str(tmp_path / "run"),
        critic__save=str(critics),
        critic__init_value_head="zeros",
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def first_write(_: object) -> None:
        assert [path.name for folder in (tmp_path / "run", critics) for path in folder.iterdir()] == [LOCK_FILE] * 2
        raise KeyError("far enough")

    monkeypatch.setattr("slime_ppo.launch.open_logs", first_write)
    with pytest.raises(SlimePpoError, match="far enough"):
        run_job(config, "local", LocalWorld(RankPlace()))
