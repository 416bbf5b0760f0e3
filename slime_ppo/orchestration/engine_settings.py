"""Config -> what SGLang's servers and their client are started with. No torch."""

import os
import socket
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from slime_ppo.config.api_key import read_api_key
from slime_ppo.config.engine_checks import server_urls
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from slime_ppo.parallel.worker_settings import DeviceKind
from slime_ppo.rollout.sglang.engine import EngineSettings
from slime_ppo.rollout.sglang.server import ExternalServer
from slime_ppo.rollout.sglang.server_args import ServerSpec, check_host, check_server_args
from slime_ppo.weight_sync.base import WeightSync
from slime_ppo.weight_sync.disk import DiskSync, FolderSync
from slime_ppo.weight_sync.distributed import DistributedSync
from slime_ppo.weight_sync.folder import served_tensors
from slime_ppo.weight_sync.tensor import SharedMemorySync, TensorSync


def check_sglang(config: Config) -> None:
    """What can be known before a server is started. Raises ConfigError."""
    if config.rollout.engine == "sglang" and config.generates:
        check_server_args(config.sglang.further_args, "--sglang-server-args")
        api_key = _api_key(config)
        if config.engine_bundles:
            _check_host(config.sglang.host, api_key)
        served_tensors(config.model.hf_checkpoint, config.model.dtype)


def _check_host(host: str, api_key: str | None) -> None:
    try:
        check_host(host, api_key)
    except ConfigError as error:
        raise ConfigError(f"--sglang-host: {error}") from error


def server_specs(config: Config, *, device: DeviceKind, log_dir: str) -> list[ServerSpec]:
    """One per engine that the run starts."""
    sglang, folder = config.sglang, os.path.abspath(config.model.hf_checkpoint)
    shape, api_key = ModelShape.from_hf_folder(folder), _api_key(config)
    return [
        ServerSpec(
            hf_folder=folder,
            dtype=config.model.dtype,
            device=device,
            max_positions=shape.max_position_embeddings,
            log_file=os.path.join(log_dir, f"sglang-server-{engine}.log"),
            tp_size=len(bundles),
            host=sglang.host,
            port=None if sglang.port is None else sglang.port + engine,
            trust_remote_code=config.model.trust_remote_code,
            fp32_lm_head=config.model.fp32_lm_head,
            deterministic=sglang.deterministic,
            random_seed=config.run.seed + engine,
            api_key=api_key,
            num_threads=config.cluster.num_threads_per_rank,
            start_timeout_s=sglang.start_timeout_s,
            extra=sglang.further_args,
        )
        for engine, bundles in enumerate(config.engine_bundles)
    ]


def external_servers(config: Config) -> list[ExternalServer]:
    """The servers of --sglang-server-urls."""
    key = _api_key(config)
    return [
        ExternalServer(url, key, start_timeout_s=config.sglang.start_timeout_s) for url in server_urls(config.sglang.server_urls)
    ]


def meeting_host(config: Config) -> str:
    """The address of this machine under which the servers reach it: loopback for our own, and for others here; otherwise that of
    the way to the first that is elsewhere. Raises ConfigError for a server's name that nobody knows."""
    asks_servers = config.generates and config.rollout.engine == "sglang"
    urls = server_urls(config.sglang.server_urls) if asks_servers else ()
    ours = (_address_towards(url) for url in urls)
    return next((address for address in ours if not address.startswith("127.")), "127.0.0.1")


def _address_towards(url: str) -> str:
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # connecting it sends nothing
        try:
            way.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise ConfigError(
                f"--sglang-server-urls {url}: no way leads there from this machine, expected a server that can meet the trainer "
                f"over IPv4: {error}"
            ) from error
        return str(way.getsockname()[0])


def engine_settings(config: Config, *, device: DeviceKind) -> EngineSettings:
    """What the client of the servers has to know."""
    sglang, shape = config.sglang, ModelShape.from_hf_folder(config.model.hf_checkpoint)
    return EngineSettings(
        shape=shape,
        device=device,
        expected=served_tensors(config.model.hf_checkpoint, config.model.dtype),
        pause_mode=sglang.pause_mode,
        deterministic=sglang.deterministic,
        max_concurrency=sglang.max_concurrency,
        max_attempts=sglang.max_attempts,
        max_restarts=sglang.max_restarts,
        request_timeout_s=sglang.request_timeout_s,
        sync_timeout_s=config.rollout.weight_sync_timeout_s,
        releases_memory=sglang.server_urls is None,
        router_url=sglang.router_url,
        api_key=_api_key(config),
        trainer_ranks=tuple(map(tuple, config.engine_bundles)) if device == "cuda" and config.engine_shares_devices else None,
    )


def _api_key(config: Config) -> str | None:
    return read_api_key(config.sglang.api_key_file, flag="--sglang-api-key-file")


def _weight_sync_path(config: Config, device: DeviceKind) -> str:
    """--weight-sync, auto resolved. Bytes in a request cost a CPU more than a broadcast does."""
    if config.rollout.weight_sync != "auto":
        return config.rollout.weight_sync
    in_memory = config.rollout.engine == "embedded" or (device == "cuda" and config.engine_shares_devices)
    return "tensor" if in_memory else "distributed"


def weight_sync(config: Config, source: Any, target: Any, *, device: DeviceKind) -> WeightSync:
    """The way that weights take in this run, from the actor's group to the engine; without an actor (--debug-rollout-only) from
    --hf-checkpoint."""
    rollout, path = config.rollout, _weight_sync_path(config, device)
    if not config.trains:
        return FolderSync(target, config.model.hf_checkpoint, bucket_bytes=rollout.weight_bucket_bytes)
    common: dict[str, Any] = {"bucket_bytes": rollout.weight_bucket_bytes, "check": rollout.check_weight_update_equal}
    if device == "cuda" and config.rollout.engine == "sglang" and path == "tensor":
        return SharedMemorySync(source, target, **common)
    if path == "distributed":
        return DistributedSync(source, target, **common)
    if path == "disk":
        return DiskSync(source, target, folder=_own_sync_folder(config), **common)
    return TensorSync(source, target, **common)


def _own_sync_folder(config: Config) -> str:
    """Where this run writes weights and no other does: below a folder that was given, which others may be given too, one that is
    named after the run folder."""
    if config.rollout.weight_sync_folder is None:
        return config.weight_sync_folder
    run = os.path.realpath(config.run.save)
    return os.path.join(config.weight_sync_folder, f"{os.path.basename(run)}-{blake2b(run.encode(), digest_size=4).hexdigest()}")
