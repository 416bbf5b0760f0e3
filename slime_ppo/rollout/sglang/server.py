"""SGLang servers from the outside: started, watched and ended by us (LocalServer), or only used (ExternalServer).

A server is a group of processes: HTTP (the main one), one scheduler for each rank, a detokenizer. When one of them dies,
SGLang takes 6 s (scheduler) to 65 s (detokenizer) to end the others, so we watch all of them and end the group ourselves.
Never asked is /health: it generates a token, and blocks while the server is paused.

Security. A server executes what /update_weights_from_tensor unpickles, and its control calls need no password by default. So
servers listen on loopback unless a host is given, another host needs an API key, the key is in every call of ours, and neither
`ps` nor a log shows it. The one socket of SGLang that would listen on all interfaces, without a key (the store in which its
ranks meet), is replaced by a file in a folder that only we can read.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.serve import API_KEY_VARIABLE
from slime_ppo.rollout.sglang.server_args import ServerSpec, server_command, server_environment

_POLL_S = 0.5
_ASK_EVERY_S = 5.0
_ASK_TIMEOUT_S = 1.0
_SILENCE_LIMIT_S = 30.0
_READY_POLL_S = 0.1
_END_TIMEOUT_S = 20.0
_SHOWN_LOG_LINES = 12
_SHOWN_LINE_CHARS = 400
# how a log is read from its end, and how much of it at most where lines never end
_LOG_BLOCK_BYTES, _MOST_LOG_BYTES = 2**14, 2**20
_SGLANG_TITLE = "sglang::"


@dataclass(frozen=True)
class ServerAddress:
    """Where a started server answers, and how many ranks it has. `incarnation` counts the starts, from 1."""

    url: str
    tp_size: int
    incarnation: int


class Server(Protocol):
    """One server's life. Calls come from one thread, except for `problem`."""

    def start(self) -> ServerAddress:
        """Start it and return when it has generated a token; nothing happens while it runs. Raises RolloutError."""
        ...

    def problem(self) -> str | None:
        """Why it is dead, None while it lives."""
        ...

    def stop(self) -> None:
        """End all its processes, return when they are gone. Nothing happens when there are none."""
        ...


class LocalServer:
    """A server on this machine, in a process group of its own, with its output appended to `spec.log_file`.

    `command` makes the command line from the spec and a port.
    """

    def __init__(self, spec: ServerSpec, command: Callable[[ServerSpec, int], list[str]] = server_command) -> None:
        self._spec = spec
        self._command = command
        self._incarnation = 0
        self._address: ServerAddress | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._meeting_folder: str | None = None
        self._problem: str | None = "it has not been started"
        self._ending = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> ServerAddress:
        if self._address is not None and self.problem() is None:
            return self._address
        self.stop()
        self._incarnation += 1
        with _reserved_port(self._spec) as port:
            url = f"http://{self._spec.host}:{port}"
            process = self._launched(port)
            try:
                self._wait_until_it_generates(process, url, port)
                members = _members(process.pid)
            except BaseException:
                self.stop()
                raise
        self._problem, self._ending = None, threading.Event()
        watched = (process, members, url, self._ending)
        threading.Thread(target=self._watch, args=watched, name=f"watch-{url}", daemon=True).start()
        self._address = ServerAddress(url, self._spec.tp_size, self._incarnation)
        return self._address

    def problem(self) -> str | None:
        return self._problem

    def stop(self) -> None:
        with self._lock:
            self._ending.set()
            process, self._process, self._address = self._process, None, None
        if process is not None:
            self._problem = "it was stopped"
            _end_group(process)
        if self._meeting_folder is not None:
            shutil.rmtree(self._meeting_folder, ignore_errors=True)
            self._meeting_folder = None

    def _launched(self, port: int) -> subprocess.Popen[bytes]:
        spec = self._spec
        self._meeting_folder = tempfile.mkdtemp(prefix="slime_ppo-server-")
        # torch's store would listen on all interfaces: the ranks of a server meet through a file instead
        meeting = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._meeting_folder}/ranks"}
        secret = {} if spec.api_key is None else {API_KEY_VARIABLE: spec.api_key}
        command = self._command(spec, port)
        Path(spec.log_file).parent.mkdir(parents=True, exist_ok=True)
        with open(spec.log_file, "ab") as log:
            log.write(f"=== start {self._incarnation}: {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                env={**_inherited(), **server_environment(spec), **meeting, **secret},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process

    def _wait_until_it_generates(self, process: subprocess.Popen[bytes], url: str, port: int) -> None:
        deadline = time.monotonic() + self._spec.start_timeout_s
        while not _listens(process.pid, port):
            if process.poll() is not None:
                raise self._start_error(f"{_how_it_ended(process.returncode)} while starting")
            if time.monotonic() > deadline:
                raise self._start_error(f"was not ready after {self._spec.start_timeout_s:g} s")
            time.sleep(_READY_POLL_S)
        # the second call takes what the first has made out of the garbage collector's rounds
        for path, body in (_first_request(self._spec), ("/freeze_gc", {})):
            try:
                status, text = _call(url + path, body, self._spec.api_key, max(1.0, deadline - time.monotonic()))
            except OSError as error:
                raise self._start_error(f"listens and does not answer {path} ({type(error).__name__}: {error})") from error
            if status != 200:
                raise self._start_error(f"answered the first {path} with {status}: {text}")

    def _start_error(self, what: str) -> RolloutError:
        return RolloutError(f"the SGLang server of {self._spec.hf_folder} {what}; {last_lines(self._spec.log_file)}")

    def _watch(
        self, process: subprocess.Popen[bytes], members: Mapping[str, psutil.Process], url: str, ending: threading.Event
    ) -> None:
        answered = asked = time.monotonic()
        while not ending.wait(_POLL_S):
            found = _death(process, members)
            if found is None and time.monotonic() - asked > _ASK_EVERY_S:
                asked = time.monotonic()
                if _answers(url, self._spec.api_key):
                    answered = time.monotonic()
                elif asked - answered > _SILENCE_LIMIT_S:
                    found = f"it has not answered {url}/model_info for {asked - answered:.0f} s"
            if found is not None:
                with self._lock:
                    if not ending.is_set():
                        # told when its memory is free; then its number may be another group's, not to be ended by `stop`
                        try:
                            _end_group(process)
                        finally:
                            self._problem = f"{found}; {last_lines(self._spec.log_file)}"
                            self._process = None
                return


class ExternalServer:
    """A server that somebody else starts and stops. `start` waits for it; called again, after it was lost, it may be another
    process, which has left every group: another incarnation."""

    def __init__(self, url: str, api_key: str | None, *, start_timeout_s: float = 60.0) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._timeout_s = start_timeout_s
        self._incarnation = 0

    def start(self) -> ServerAddress:
        deadline = time.monotonic() + self._timeout_s
        while (problem := self.problem()) is not None:
            if time.monotonic() > deadline:
                raise RolloutError(f"no SGLang server at {self._url} after {self._timeout_s:g} s: {problem}")
            time.sleep(_POLL_S)
        status, text = _call(self._url + "/server_info", None, self._api_key, self._timeout_s)
        if status != 200:
            raise RolloutError(f"{self._url}/server_info answered {status}: {text}")
        self._incarnation += 1
        return ServerAddress(self._url, int(json.loads(text)["tp_size"]), self._incarnation)

    def problem(self) -> str | None:
        try:
            status, text = _call(self._url + "/model_info", None, self._api_key, 10.0)
        except OSError as error:
            return f"{self._url}/model_info: {type(error).__name__}: {error}"
        return None if status == 200 else f"{self._url}/model_info answered {status}: {text}"

    def stop(self) -> None:
        """Nothing: it is not ours."""


def _inherited() -> dict[str, str]:
    """This process's environment, without what torchrun has told it as one of its ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith("TORCHELASTIC_")}


def last_lines(log_file: str, count: int = _SHOWN_LOG_LINES) -> str:
    """The end of a server's log, for an error text. A log of weeks is not read to its beginning for that."""
    with contextlib.suppress(OSError), open(log_file, "rb") as file:
        start, found = file.seek(0, os.SEEK_END), b""
        # one line more than is shown: the first may be cut
        while start > 0 and found.count(b"\n") <= count and len(found) < _MOST_LOG_BYTES:
            end, start = start, max(start - _LOG_BLOCK_BYTES, 0)
            file.seek(start)
            found = file.read(end - start) + found
        lines = found.decode("utf-8", errors="replace").splitlines()[-count:]
        return f"the last lines of {log_file}:\n" + "\n".join(line[:_SHOWN_LINE_CHARS] for line in lines)
    return f"{log_file} cannot be read"


@contextlib.contextmanager
def _reserved_port(spec: ServerSpec) -> Iterator[int]:
    """A port that is ours until the block ends: bound and not listening, which the server's own bind can share."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((spec.host, spec.port or 0))
        except OSError as error:
            raise RolloutError(
                f"the SGLang server of {spec.hf_folder} cannot listen on {spec.host}:{spec.port}: {error.strerror}; "
                "another program does, or the host is not an address of this machine"
            ) from error
        yield held.getsockname()[1]


def _first_request(spec: ServerSpec) -> tuple[str, dict[str, Any]]:
    if spec.is_reward_model:
        return "/classify", {"input_ids": [1]}
    return "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}


def _call(url: str, body: Mapping[str, Any] | None, api_key: str | None, timeout_s: float) -> tuple[int, str]:
    """Status and text of a GET, or a POST of `body`. Raises OSError."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    try:
        connection.request("GET" if body is None else "POST", parts.path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _answers(url: str, api_key: str | None) -> bool:
    with contextlib.suppress(OSError):
        return _call(url + "/model_info", None, api_key, _ASK_TIMEOUT_S)[0] == 200
    return False


def _listens(pid: int, port: int) -> bool:
    """Whether process `pid` itself listens on `port`: another server that answers there is not ours."""
    with contextlib.suppress(psutil.Error):
        connections = psutil.Process(pid).net_connections(kind="tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)
    return False


def _members(pid: int) -> dict[str, psutil.Process]:
    """SGLang's processes below the main one by what they call themselves: scheduler, detokenizer."""
    children = psutil.Process(pid).children(recursive=True)
    titles = {child: " ".join(child.cmdline()[:1]) for child in children}
    return {title.strip(): child for child, title in titles.items() if title.startswith(_SGLANG_TITLE)}


def _death(process: subprocess.Popen[bytes], members: Mapping[str, psutil.Process]) -> str | None:
    """Which of the group's processes has died, and how; None while all live."""
    if process.poll() is not None:
        return f"its HTTP process (pid {process.pid}) {_how_it_ended(process.returncode)}"
    for name, member in members.items():
        if not _lives(member):
            return f"its process {name} (pid {member.pid}) died"
    return None


def _lives(member: psutil.Process) -> bool:
    try:
        return bool(member.is_running() and member.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole group, and wait until none of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_TIMEOUT_S)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _group_lives(group: int) -> bool:
    """Whether a process of the group is left; one that has ended and that nobody has collected counts as gone."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
