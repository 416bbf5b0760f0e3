"""SGLang servers and engines for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.rollout.sglang.engine import EngineSettings, SGLangEngine
from slime_ppo.rollout.sglang.server import LocalServer, Server
from slime_ppo.rollout.sglang.server_args import ServerSpec
from slime_ppo.weight_sync.folder import served_tensors

MAX_POSITIONS = 512
"""Of `make_tiny_llama`."""


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


def tiny_engine(servers: Sequence[Server], folder: Path, **options: Any) -> SGLangEngine:
    """An engine on servers of `folder`."""
    settings: dict[str, Any] = {
        "pause_mode": "abort", "deterministic": False, "max_concurrency": None, "max_attempts": 3, "max_restarts": 10,
        "request_timeout_s": 600.0, "sync_timeout_s": 600.0, "trainer_ranks": None, "releases_memory": True, "router_url": None,
        "api_key": None,
    }  # fmt: skip
    shape, expected = ModelShape.from_hf_folder(folder), served_tensors(folder, "float32")
    return SGLangEngine(servers, EngineSettings(shape=shape, device="cpu", expected=expected, **(settings | options)))
