"""The trackers a run asked for."""

from slime_ppo.config.tracking import TrackingConfig
from slime_ppo.tracking.base import Tracker, TrackerSet
from slime_ppo.tracking.console import ConsoleTracker
from slime_ppo.tracking.jsonl import JsonlTracker
from slime_ppo.tracking.report import ReportTracker
from slime_ppo.tracking.tensorboard import TensorBoardTracker
from slime_ppo.tracking.wandb import WandbTracker


def build_trackers(config: TrackingConfig) -> TrackerSet:
    """Console, metrics.jsonl and report always; TensorBoard and Weights & Biases behind their flags.

    Nothing is started. The optional ones come first: one that cannot start must not find the files of an earlier run emptied.
    Raises ConfigError when a package is missing.
    """
    optional: list[Tracker] = []
    if config.use_tensorboard:
        optional.append(TensorBoardTracker())
    if config.use_wandb:
        optional.append(WandbTracker(project=config.wandb_project, group=None, mode=config.wandb_mode))
    return TrackerSet([*optional, JsonlTracker(), ReportTracker(), ConsoleTracker()])
