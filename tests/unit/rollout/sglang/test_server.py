"""The life of a server, on a program that only looks like one: real ones are in tests/sglang/test_server.py."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang import server as server_module
from slime_ppo.rollout.sglang.server import ExternalServer, LocalServer, last_lines
from slime_ppo.rollout.sglang.server_args import ServerSpec

REPOSITORY = Path(__file__).resolve().parents[4]
FAKE = "tests.helpers.fake_sglang"


def _command(spec: ServerSpec, port: int) -> list[str]:
    extra = [part for name, values in spec.extra for part in (f"--{name}", *values)]
    return [sys.executable, "-m", FAKE, str(os.getpid()), str(port), *extra]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerSpec:
    monkeypatch.chdir(REPOSITORY)
    return ServerSpec(
        hf_folder="model", dtype="float32", device="cpu", max_positions=64, log_file=str(tmp_path / "log"), start_timeout_s=30
    )


@pytest.fixture
def server(spec: ServerSpec) -> Iterator[LocalServer]:
    server = LocalServer(spec, _command)
    yield server
    server.stop()


def _pids(spec: ServerSpec) -> tuple[int, ...]:
    """The HTTP process, scheduler and detokenizer of the last start."""
    lines = [line for line in Path(spec.log_file).read_text().splitlines() if line.startswith("pids")]
    return tuple(int(word) for word in lines[-1].split()[1:])


def _within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_start_twice_is_one_start_and_start_after_stop_another(server: LocalServer, spec: ServerSpec) -> None:
    first = server.start()
    assert (server.start(), server.problem(), first.incarnation) == (first, None, 1)
    old = _pids(spec)
    server.stop()
    assert all(_gone(pid) for pid in old) and server.problem() == "it was stopped"
    server.stop()
    assert server.start().incarnation == 2 and server.problem() is None
    assert Path(spec.log_file).read_text().count("=== start") == 2


@pytest.mark.parametrize(("which", "words"), [(0, "HTTP process"), (1, "sglang::scheduler"), (2, "sglang::detokenizer")])
def test_death_of_any_process_ends_the_group_and_is_told(server: LocalServer, spec: ServerSpec, which: int, words: str) -> None:
    server.start()
    pids = _pids(spec)
    os.kill(pids[which], signal.SIGKILL)
    assert _within(3.0, lambda: server.problem() is not None and all(_gone(pid) for pid in pids))
    problem = server.problem()
    assert problem is not None and words in problem and str(pids[which]) in problem and spec.log_file in problem
    assert server.start().incarnation == 2 and server.problem() is None


def test_server_that_stops_answering_is_ended(spec: ServerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_ASK_EVERY_S": 0.2, "_ASK_TIMEOUT_S": 0.2, "_SILENCE_LIMIT_S": 1.0}.items():
        monkeypatch.setattr(f"slime_ppo.rollout.sglang.server.{name}", value)
    server = LocalServer(replace(spec, extra=(("silent-after", ("4",)),)), _command)
    try:
        server.start()
        assert _within(10.0, lambda: server.problem() is not None)
        assert "has not answered" in str(server.problem())
        assert all(_gone(pid) for pid in _pids(spec))
    finally:
        server.stop()


def test_taken_port_is_found_before_anything_is_started(spec: ServerSpec) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RolloutError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            LocalServer(replace(spec, port=port), _command).start()
    assert not Path(spec.log_file).exists()


def test_fixed_port_serves_again_after_a_kill(spec: ServerSpec) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = LocalServer(replace(spec, port=port), _command)
    try:
        first = server.start()
        os.killpg(_pids(spec)[0], signal.SIGKILL)
        assert _within(3.0, lambda: server.problem() is not None)
        assert server.start().url == first.url == f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def test_program_that_ends_while_starting_is_told_with_its_last_lines(spec: ServerSpec) -> None:
    def ends(_: ServerSpec, port: int) -> list[str]:
        return [sys.executable, "-c", "import sys; print('unrecognized arguments: --nonsense'); sys.exit(2)"]

    with pytest.raises(RolloutError, match="ended with exit code 2 while starting(.|\n)*unrecognized arguments: --nonsense"):
        LocalServer(spec, ends).start()


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 2**14])
def test_last_lines_are_those_of_the_whole_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(server_module, "_LOG_BLOCK_BYTES", block_bytes)
    log = tmp_path / "log"
    for text in ("", "one", "one\n\ntwo\n", "".join(f"é line {number}\n" for number in range(50)), "é" * 500):
        log.write_text(text, encoding="utf-8")
        expected = "\n".join(line[:400] for line in text.splitlines()[-12:])
        assert last_lines(str(log)) == f"the last lines of {log}:\n{expected}"
    assert last_lines(f"{log}.no") == f"{log}.no cannot be read"


def test_last_lines_of_a_huge_log_read_its_end_alone(tmp_path: Path) -> None:
    """A hole of a terabyte, which takes no space."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"end\n" * 20)
    assert last_lines(str(log)).count("\nend") == 12


def test_program_that_never_listens_is_ended_at_the_timeout(spec: ServerSpec) -> None:
    def sleeps(_: ServerSpec, port: int) -> list[str]:
        return ["sleep", "1000"]

    server = LocalServer(replace(spec, start_timeout_s=0.5), sleeps)
    with pytest.raises(RolloutError, match="was not ready after 0.5 s"):
        server.start()
    assert server.problem() == "it was stopped"


def test_owner_killed_leaves_no_server_behind(spec: ServerSpec) -> None:
    """The symptom: kill -9 of the process that owns a server, and the server's processes stay."""
    program = f"""
import time
from slime_ppo.rollout.sglang.server import LocalServer
from tests.unit.rollout.sglang.test_server import _command
from slime_ppo.rollout.sglang.server_args import ServerSpec
spec = ServerSpec(hf_folder="m", dtype="float32", device="cpu", max_positions=64, log_file={spec.log_file!r})
server = LocalServer(spec, _command)
server.start()
print("started", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "started\n"
        pids = _pids(spec)
        owner.kill()
    assert _within(5.0, lambda: all(_gone(pid) for pid in pids))


def test_api_key_is_sent_and_is_neither_in_the_arguments_nor_in_the_log(spec: ServerSpec) -> None:
    server = LocalServer(replace(spec, api_key="a-secret"), _command)
    try:
        external = ExternalServer(server.start().url, "a-secret")
        assert external.start().tp_size == 3
        pids = _pids(spec)
        assert not any("a-secret" in " ".join(psutil.Process(pid).cmdline()) for pid in pids)
        assert "a-secret" not in Path(spec.log_file).read_text() and "a-secret" not in repr(replace(spec, api_key="a-secret"))
    finally:
        server.stop()


def test_external_server_is_waited_for_and_never_stopped(server: LocalServer) -> None:
    external = ExternalServer(server.start().url + "/", None)
    address = external.start()
    assert (address.tp_size, address.incarnation, external.problem()) == (3, 1, None)
    external.stop()
    assert server.problem() is None and external.problem() is None
    # the key never travels in the clear to an address that was given as https
    assert "SSLError" in str(ExternalServer(address.url.replace("http:", "https:"), "a-secret").problem())
    server.stop()
    assert "ConnectionRefusedError" in str(external.problem())
    with pytest.raises(RolloutError, match="no SGLang server at .* after 0.1 s"):
        ExternalServer(address.url, None, start_timeout_s=0.1).start()
