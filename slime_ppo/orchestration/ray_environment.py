"""The environment Ray reads when it is imported. Imports no Ray."""

import os
import secrets

from slime_ppo.config.cluster import ClusterConfig

_LOCAL = {
    "RAY_raylet_start_wait_time_s": "180",  # 30 s is too short on a busy machine
    "RAY_memory_monitor_refresh_ms": "0",  # it counts the whole machine and kills ranks for others' memory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def cluster_address(config: ClusterConfig) -> str | None:
    """The cluster to join: --ray-address, else RAY_ADDRESS (set by `ray job submit`), else None: a local one is started.

    "local", Ray's own word for that, and an empty RAY_ADDRESS mean the same.
    """
    address = os.environ.get("RAY_ADDRESS") if config.ray_address is None else config.ray_address
    return None if address in ("", "local") else address


def prepare_ray_environment(config: ClusterConfig) -> None:
    """Set what a local cluster needs; call before the first `import ray`. RAY_ variables that are set already are kept.

    A local cluster listens on all network interfaces and cannot be told otherwise. Its lock is a token: one made for this
    run, known to its own processes only.
    """
    if cluster_address(config) is not None:
        return
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads_per_rank)
    for name, value in _LOCAL.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
