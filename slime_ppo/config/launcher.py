"""Who starts the ranks: Ray, or torchrun (or nobody: one rank in the process that was called)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError

LauncherName = Literal["ray", "local"]

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class RankPlace:
    """This process among the ranks of a run without Ray. `started_by_torchrun` False: one rank, alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    started_by_torchrun: bool = False

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "RankPlace":
        """The place that torchrun gave this process, or that of a process on its own."""
        if any(name not in environment for name in _TORCHRUN_VARIABLES):
            return RankPlace()
        rank, world_size, local_rank = (int(environment[name]) for name in _TORCHRUN_VARIABLES)
        return RankPlace(rank, world_size, local_rank, started_by_torchrun=True)


def chosen_launcher(config: Config, place: RankPlace) -> LauncherName:
    """--launcher, with auto resolved. Raises ConfigError when the ranks that were started are not those that the config asks
    for."""
    if config.cluster.launcher == "auto":
        launcher: LauncherName = "local" if place.started_by_torchrun else "ray"
    else:
        launcher = config.cluster.launcher
    if launcher == "local":
        _check_local_ranks(config, place)
    elif place.world_size > 1:
        raise ConfigError(
            f"--launcher ray in one of {place.world_size} processes of torchrun: Ray starts the ranks itself. Start the script "
            "without torchrun, or leave --launcher out"
        )
    return launcher


def launcher_text(launcher: LauncherName, place: RankPlace) -> str:
    """How the run is started, for its first lines."""
    if launcher == "ray":
        return "launcher: ray"
    ranks = "1 rank" if place.world_size == 1 else f"{place.world_size} ranks"
    return f"launcher: local, {ranks}{' by torchrun' if place.started_by_torchrun else ''}, no Ray"


def _check_local_ranks(config: Config, place: RankPlace) -> None:
    if not config.trains:
        if place.world_size > 1:
            raise ConfigError(
                f"--debug-rollout-only in {place.world_size} processes of torchrun: it starts no ranks, and one process generates. "
                "Start the script without torchrun"
            )
        return
    if not config.cluster.colocate:
        raise ConfigError(
            "--no-colocate without Ray: actor, critic and rollout engine live in the same processes there and share their devices. "
            "Leave it out, or use --launcher ray"
        )
    actor = config.role("actor")
    if config.has_critic:
        critic = config.role("critic")
        for what, name in (
            ("ranks", "num_ranks"),
            ("ranks per tensor-parallel group", "tp_size"),
            ("ranks per context-parallel group", "cp_size"),
            ("pipeline stages", "pp_size"),
            ("virtual stages per rank", "vpp_size"),
            ("ranks per expert-parallel group", "ep_size"),
            ("ranks per expert", "etp_size"),
        ):
            ours, theirs = getattr(actor.layout, name), getattr(critic.layout, name)
            if ours != theirs:
                raise ConfigError(
                    f"the actor has {ours} {what}, the critic {theirs}: without Ray both live in the same processes and share "
                    "their groups, so their layouts must be equal. Leave the --critic-... sizes out, or use --launcher ray"
                )
    if config.engine_bundles and actor.num_nodes > 1 and config.num_rollout_devices > actor.num_ranks_per_node:
        raise ConfigError(
            f"SGLang's servers have {config.num_rollout_devices} devices (--rollout-num-gpus), and without Ray all servers run on "
            f"the first node, with {actor.num_ranks_per_node}. Give --rollout-num-gpus {actor.num_ranks_per_node} or less, or use "
            "--launcher ray"
        )
    if actor.num_ranks != place.world_size:
        started = "torchrun has started" if place.started_by_torchrun else "without torchrun there is"
        raise ConfigError(
            f"the run asks for {actor.num_ranks} ranks (--actor-num-nodes {actor.num_nodes} x --actor-num-gpus-per-node "
            f"{actor.num_ranks_per_node}), {started} {place.world_size}. Use torchrun --nnodes {actor.num_nodes} "
            f"--nproc-per-node {actor.num_ranks_per_node}, or make the two agree by --actor-num-gpus-per-node"
        )
