"""Section `cluster`: launcher, devices, Ray and time limits."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class ClusterConfig:
    """What the run may use, and how long it waits."""

    launcher: Literal["auto", "ray", "local"] = option(
        "auto",
        help="who runs the ranks: ray starts them; local takes those of torchrun, or one without it; auto = local under torchrun, "
        "else ray",
    )
    device: Literal["cpu", "cuda", "auto"] = option("auto", help="where the ranks compute; auto = cuda when there is one")
    colocate: bool = option(
        True,
        help="actor, critic and rollout engine share devices and take turns; otherwise each has devices of its own, nothing is "
        "offloaded, and the critic trains beside the actor",
    )
    offload: bool = option(True, help="roles that share a device free its memory while another role is awake")
    num_threads_per_rank: int = option(1, help="CPU threads of each rank and of the engine", unit="threads", at_least=1)
    ray_address: str | None = option(
        None, help="Ray cluster to join", default_text="the RAY_ADDRESS variable, else a local cluster is started"
    )
    placement_timeout_s: float = option(60.0, help="wait for the placement group", unit="seconds", above=0)
    worker_start_timeout_s: float = option(300.0, help="wait for ranks and engine to start", unit="seconds", above=0)
    call_timeout_s: float = option(1800.0, help="wait for one phase of any role", unit="seconds", above=0)
    object_store_bytes: int = option(
        256 * 1024 * 1024, help="shared memory of a local Ray cluster", unit="bytes", at_least=80 * 1024 * 1024
    )
