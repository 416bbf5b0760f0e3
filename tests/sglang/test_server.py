"""Stock SGLang in the hands of our launcher: what only a real server can show."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.server import ExternalServer, LocalServer, ServerAddress
from slime_ppo.rollout.sglang.server_args import ServerSpec
from tests.helpers.sglang_servers import KEY, MAX_POSITIONS
from tests.helpers.tiny_llama import EOS_ID


@dataclass(frozen=True)
class Running:
    spec: ServerSpec
    address: ServerAddress

    def call(self, path: str, body: dict[str, object] | None = None, key: str | None = KEY) -> dict[str, object]:
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.address.url + path, data, headers), timeout=60) as answer:
            content = answer.read()
        return json.loads(content) if content.startswith(b"{") else {}

    def generate(self, prompt_len: int, **sampling: object) -> dict[str, object]:
        return self.call("/generate", {"input_ids": [5] * prompt_len, "sampling_params": {"temperature": 1.0, **sampling}})

    def group(self) -> list[psutil.Process]:
        """The processes of the server, found by its port in their arguments and below."""
        port = self.address.url.rpartition(":")[2]
        [main] = [one for one in psutil.Process().children() if port in one.cmdline()]
        return [main, *main.children(recursive=True)]


@pytest.fixture(scope="module")
def spec(sglang_server: LocalServer) -> ServerSpec:
    return sglang_server._spec


@pytest.fixture(scope="module")
def running(sglang_server: LocalServer, spec: ServerSpec) -> Running:
    return Running(spec, sglang_server.start())


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for whoever adopted it to collect it does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_server_takes_prompt_and_response_up_to_the_models_positions(running: Running) -> None:
    """The symptom: `--context-length N` answers two tokens fewer and calls it `length`."""
    answer = running.generate(MAX_POSITIONS - 16, max_new_tokens=16, ignore_eos=True)
    assert len(list(answer["output_ids"])) == 16  # type: ignore[call-overload]
    stopped = running.generate(4, max_new_tokens=60, stop_token_ids=[*range(4, 100)])
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"  # type: ignore[index]
    assert len(list(stopped["output_ids"])) == 1  # type: ignore[call-overload]
    assert EOS_ID == 3


def test_every_call_needs_the_key_which_nobody_can_read_from_outside(running: Running) -> None:
    for path, body in (("/model_info", None), ("/generate", {}), ("/pause_generation", {}), ("/update_weights_from_tensor", {})):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            running.call(path, body, key=None)
    assert "weight_version" in running.call("/model_info")
    assert not any(KEY in " ".join(one.cmdline()) for one in running.group())
    assert KEY not in Path(running.spec.log_file).read_text(encoding="utf-8")


def test_no_process_listens_beyond_loopback(running: Running) -> None:
    sockets = [one for process in running.group() for one in process.net_connections(kind="inet")]
    listening = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= 2
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_idle_and_paused_server_burns_no_core(running: Running) -> None:
    group = running.group()
    before = _cpu_s(group)
    time.sleep(2.0)
    idle = _cpu_s(group) - before
    running.call("/pause_generation", {"mode": "abort"})
    before = _cpu_s(group)
    time.sleep(2.0)
    paused = _cpu_s(group) - before
    running.call("/continue_generation", {})
    assert idle < 0.4 and paused < 0.4


def test_server_is_the_stock_one_on_the_torch_of_a_cpu(running: Running) -> None:
    assert running.call("/server_info")["version"] == "0.5.23"
    assert torch.version.cuda is None


def test_only_the_families_that_we_serve_are_imported(running: Running) -> None:
    """SGLang says which of its 250 model files it could not import on this machine; with ours named it tries none of them."""
    assert "Ignore import error" not in Path(running.spec.log_file).read_text(encoding="utf-8")


def test_processes_share_what_the_first_has_imported(running: Running) -> None:
    """The symptom: each imported SGLang for itself, 10 CPU seconds and 0.4 GB, and megatron with it."""
    _, *others = running.group()
    assert {one.name() for one in others} == {"sglang::scheduler", "sglang::detokenizer"}
    [detokenizer] = [one for one in others if "detokenizer" in one.name()]
    assert _cpu_s([detokenizer]) < 2.0 and "megatron" not in Path(running.spec.log_file).read_text(encoding="utf-8")


def test_external_server_is_used_with_its_key(running: Running) -> None:
    assert ExternalServer(running.address.url, KEY).start() == replace(running.address, incarnation=1)
    with pytest.raises(RolloutError, match="/model_info answered 401"):
        ExternalServer(running.address.url, None, start_timeout_s=0.1).start()


def test_owner_killed_during_the_load_leaves_no_process(spec: ServerSpec) -> None:
    program = (
        "from slime_ppo.rollout.sglang.server import LocalServer\n"
        "from slime_ppo.rollout.sglang.server_args import ServerSpec\n"
        f"server = LocalServer({replace(spec, log_file=spec.log_file + '.killed')!r})\n"
        "server.start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as owner:
        deadline = time.monotonic() + 30.0
        children: list[psutil.Process] = []
        while not (children := psutil.Process(owner.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(3.0)
        assert _lives(children[0].pid)
        group = os.getpgid(children[0].pid)
        owner.kill()
    deadline = time.monotonic() + 10.0
    while _lives(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _lives(group)
