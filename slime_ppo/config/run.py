"""Section `run`: the run folder, its length and its seed."""

from dataclasses import dataclass

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class RunConfig:
    """Where the run writes, how long it is, and what makes it repeatable."""

    save: str = option("runs/ppo", help="run folder: resolved config, metrics, report, logs and final weights", unit="folder")
    overwrite: bool = option(False, help="give up the run that the run folder already holds")
    seed: int = option(0, help="seed of prompts, sampling and shuffles", at_least=0, below=2**63)
    num_rollout: int = option(25, help="total number of rollouts of the run", unit="rollouts", at_least=1)
    deterministic: bool = option(True, help="use torch's deterministic algorithms: same seed, same numbers")
