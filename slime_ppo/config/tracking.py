"""Section `tracking`: trackers beside the metrics file, the samples file and the report, which are always written."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go as well, and how many samples are kept."""

    use_tensorboard: bool = option(False, help="write TensorBoard events to <save>/tensorboard")
    use_wandb: bool = option(False, help="log to Weights & Biases")
    wandb_project: str = option("slime_ppo", help="Weights & Biases project")
    wandb_mode: Literal["online", "offline"] = option("online", help="send to Weights & Biases, or write its files only")
    log_sample_interval: int = option(5, help="keep samples for the report every so many rollouts", unit="rollouts", at_least=1)
    num_logged_samples: int = option(8, help="samples kept each time", unit="samples", at_least=0)
