"""Section `checkpoint`: what a run saves to go on from, and what it goes on from."""

from dataclasses import dataclass

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving the whole state of a run, and resuming from it."""

    load: str | None = option(
        None,
        help="where the run starts: a run folder is resumed, exactly; of a Hugging Face or torch_dist folder the actor takes the "
        "weights only. With the folder of --save, also one that is empty yet: a job that is started again goes on",
        unit="folder",
        default_text="weights of --hf-checkpoint",
    )
    ckpt_step: int | None = option(
        None,
        help="with --load RUN: the kept checkpoint after so many rollouts",
        unit="rollouts",
        default_text="the newest",
        at_least=1,
    )
    save_checkpoints: bool = option(
        True,
        help="save weights, optimizer, data position and counters of all roles at the end, and when SIGTERM asks the run to end",
    )
    save_interval: int | None = option(
        None, help="save every so many rollouts, too", unit="rollouts", default_text="off", at_least=1
    )
    async_save: bool = option(
        False, help="write a checkpoint while the next rollout is generated; it takes host memory for a copy of the state"
    )
    keep_checkpoints: int | None = option(
        2, help="newest checkpoints that stay; an older one is deleted when a new one is whole; null = all", at_least=1
    )
