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


def replay(
    config: Config,
    training: TrainingDump,
    folders: Mapping[RoleName, str],
    checkpoints: Mapping[RoleName, str | None],
    with_optimizer: bool,
) -> dict[RoleName, Replayed]:
    """Train the roles of `folders`, which say where their weights are saved, as `config` lays them out, from `checkpoints` where
    they have one. Collective."""
    found = {}
    for name, folder in folders.items():
        role, checkpoint = _started(config, name, checkpoints[name]), checkpoints[name]
        if with_optimizer and checkpoint is not None:
            role.load_checkpoint(checkpoint, with_optimizer=True)
        found[name] = _replay_role(role, training, name)
        role.save_hf(folder, config.rollout.weight_bucket_bytes)
    return found


def _replay_role(role: RankRole, training: TrainingDump, name: RoleName) -> Replayed:
    batch = training.batch
    if name == "actor":
        column, (part, _) = "old_log_probs", role.compute_log_probs(batch)
    else:
        column, (part, _) = "values", role.compute_advantages(batch, training.kl_coef)
    made = batch.with_parts(gather_objects(part, dist.group.WORLD))
    off = np.abs(getattr(made, column) - getattr(batch, column))
    stats = role.train(batch, training.plan, training.learning_rates[name])
    per_rank = gather_objects(stats, dist.group.WORLD)
    steps = [merge_stats(step).result() for step in zip(*per_rank, strict=True)]
    return Replayed(steps, float(np.where(batch.loss_mask, off, 0.0).max(initial=0.0)))


def _started(config: Config, name: RoleName, checkpoint: str | None) -> RankRole:
    """The role on this rank. The file has the reference's log-probs, so that no reference is needed."""
    settings = worker_settings(config, name, init_method=STANDING_GROUP, device="cpu")[dist.get_rank()]
    model = replace(settings.model, ref_folder=None, checkpoint_folder=checkpoint)
    settings = replace(settings, model=model, starts_offloaded=False)
    role = RankRole()
    if name == "actor":
        role.start_actor(settings, config.ppo, config.correction, config.rollout.rollout_temperature)
    else:
        role.start_critic(settings, config.ppo)
    return role
