"""SGLang servers and engines for tests."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.rollout.sglang.engine import EngineSettings, SGLangEngine
from slime_ppo.rollout.sglang.server import ExternalServer, LocalServer, Server
from slime_ppo.rollout.sglang.server_args import ServerSpec
from slime_ppo.weight_sync.folder import served_tensors

MAX_POSITIONS = 512
"""Of `make_tiny_llama`."""
KEY = "key-of-the-test"
NOTICED_S = 5.0
SERVING_AGAIN_S = 30.0
"""Of one server on a machine that does nothing else, where the start takes most of it. Where several start together, or the
machine does other things (`load`), as many times longer is allowed."""


def tiny_spec(folder: Path, log_file: Path, **options: Any) -> ServerSpec:
    """A server of a tiny float32 model, one thread, on a CPU."""
    return ServerSpec(
        hf_folder=str(folder),
        dtype="float32",
        device="cpu",
        max_positions=MAX_POSITIONS,
        log_file=str(log_file),
        start_timeout_s=300.0,
        **options,
    )


def tiny_server(folder: Path, log_file: Path, **options: Any) -> LocalServer:
    """As `tiny_spec` says."""
    return LocalServer(tiny_spec(folder, log_file, **options))


def external(server: LocalServer) -> ExternalServer:
    """A server of the tests in the hands of an engine that must not end it."""
    return ExternalServer(server.start().url, KEY)


def tiny_engine(servers: Sequence[Server], folder: Path, **options: Any) -> SGLangEngine:
    """An engine on servers of `folder`, with the tests' key, which a server without one ignores."""
    settings: dict[str, Any] = {
        "pause_mode": "abort", "deterministic": False, "max_concurrency": None, "max_attempts": 3, "max_restarts": 10,
        "request_timeout_s": 600.0, "sync_timeout_s": 600.0, "trainer_ranks": None, "releases_memory": True, "router_url": None,
        "api_key": KEY, "device": "cpu", "expected": served_tensors(folder, "float32"),
    }  # fmt: skip
    return SGLangEngine(servers, EngineSettings(shape=ModelShape.from_hf_folder(folder), **(settings | options)))


def load() -> float:
    """How many times longer than alone a process takes now: those that want a core, by cores; at least 1."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
