"""What each rank runs to replay the steps of a rollout file: it builds a role, trains on the file's columns, saves the weights."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from slime_ppo.backends.megatron.collectives import gather_objects  # noqa: E402
from slime_ppo.config.roles import RoleName  # noqa: E402
from slime_ppo.config.root import Config  # noqa: E402
from slime_ppo.orchestration.rank_role import RankRole  # noqa: E402
from slime_ppo.orchestration.worker_settings import worker_settings  # noqa: E402
from slime_ppo.parallel.worker_settings import STANDING_GROUP  # noqa: E402
from slime_ppo.rollout.dump import TrainingDump  # noqa: E402
from slime_ppo.types.stats import merge_stats  # noqa: E402
from tools.layouts.replay import Replayed  # noqa: E402


def replay(config: Config, training: TrainingDump, folders: Mapping[RoleName, str]) -> dict[RoleName, Replayed]:
    """Train the roles of `folders`, which say where their weights are saved, as `config` lays them out. Collective."""
    return {name: _replay_role(config, training, name, folder) for name, folder in folders.items()}


def _replay_role(config: Config, training: TrainingDump, name: RoleName, folder: str) -> Replayed:
    role, batch = _started(config, name), training.batch
    if name == "actor":
        column, (part, _) = "old_log_probs", role.compute_log_probs(batch)
    else:
        column, (part, _) = "values", role.compute_advantages(batch, training.kl_coef)
    made = batch.with_parts(gather_objects(part, dist.group.WORLD))
    off = np.abs(getattr(made, column) - getattr(batch, column))
    stats = role.train(batch, training.plan, training.learning_rates[name])
    per_rank = gather_objects(stats, dist.group.WORLD)
    role.save_hf(folder, config.rollout.weight_bucket_bytes)
    steps = [merge_stats(step).result() for step in zip(*per_rank, strict=True)]
    return Replayed(steps, float(np.where(batch.loss_mask, off, 0.0).max(initial=0.0)))


def _started(config: Config, name: RoleName) -> RankRole:
    """The role on this rank. The file has the reference's log-probs, so that no reference is needed."""
    settings = worker_settings(config, name, init_method=STANDING_GROUP, device="cpu")[dist.get_rank()]
    settings = replace(settings, model=replace(settings.model, ref_folder=None), starts_offloaded=False)
    role = RankRole()
    if name == "actor":
        role.start_actor(settings, config.ppo, config.correction, config.rollout.rollout_temperature)
    else:
        role.start_critic(settings, config.ppo)
    return role
