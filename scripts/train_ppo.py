"""Train a language model by PPO on a Ray cluster.

python scripts/train_ppo.py --config configs/quickstart_cpu.yaml
python scripts/train_ppo.py --config configs/quickstart_cpu.yaml --dry-run
ray job submit --working-dir . -- python scripts/train_ppo.py --config my.yaml --seed 1
"""

import os
import sys

from slime_ppo.config.cli import ParsedCommand, print_config_text, run_cli


def main(command: ParsedCommand) -> int:
    """Print what was asked for, or train."""
    if command.print_config:
        print(print_config_text(command), end="")
        return 0
    if command.dry_run:
        from slime_ppo.config.dry_run import dry_run_report
        from slime_ppo.config.preflight import preflight

        shapes = preflight(command.config)
        print(dry_run_report(command.config, shapes.actor, critic_shape=shapes.critic), end="")
        return 0
    from slime_ppo.orchestration.ray_environment import prepare_ray_environment

    prepare_ray_environment(command.config.cluster)
    from slime_ppo.launch import run_ppo  # imports Ray, which reads the environment

    return run_ppo(command.config)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # reward functions are found where the command is typed
    try:
        sys.exit(run_cli(sys.argv[1:], main))
    except KeyboardInterrupt:  # before the run had begun
        sys.exit(130)
