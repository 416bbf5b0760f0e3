"""Train a language model by PPO, on a Ray cluster or on the ranks of torchrun.

python scripts/train_ppo.py --config configs/quickstart_cpu.yaml
python scripts/train_ppo.py --config configs/quickstart_cpu.yaml --dry-run
torchrun --nproc-per-node 2 scripts/train_ppo.py --config configs/quickstart_cpu.yaml --actor-num-gpus-per-node 2
ray job submit --working-dir . -- python scripts/train_ppo.py --config my.yaml --seed 1
"""

import os
import sys
from functools import partial

from slime_ppo.config.cli import ParsedCommand, print_config_text, run_cli
from slime_ppo.config.launcher import RankPlace, chosen_launcher
from slime_ppo.orchestration.local_world import LocalWorld


def main(world: LocalWorld, command: ParsedCommand) -> int:
    """Print what was asked for, or train."""
    if command.print_config:
        print(print_config_text(command), end="")
        return 0
    launcher = chosen_launcher(command.config, world.place)
    if command.dry_run:
        from slime_ppo.config.dry_run import dry_run_report
        from slime_ppo.config.preflight import preflight
        from slime_ppo.orchestration.engine_settings import check_sglang

        shapes = preflight(command.config)
        check_sglang(command.config)
        print(dry_run_report(command.config, shapes.actor, critic_shape=shapes.critic, launcher=launcher), end="")
        return 0
    if launcher == "ray":
        from slime_ppo.orchestration.ray_environment import prepare_ray_environment

        prepare_ray_environment(command.config.cluster)
    from slime_ppo.launch import run_ppo  # may import Ray, which reads the environment

    return run_ppo(command.config, launcher, world)


def start(place: RankPlace) -> int:
    """Rank 0 runs the command line, the others do what it says. Returns the exit code."""
    if place.rank > 0:
        from slime_ppo.orchestration.local_ranks import serve_rank

        return serve_rank(place)
    world, code = LocalWorld(place), 1
    try:
        code = run_cli(sys.argv[1:], partial(main, world))
    except SystemExit as end:  # --help
        code = 1 if end.code else 0
    except KeyboardInterrupt:  # before the run had begun
        code = 130
    finally:
        world.end(code)
    return code


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # reward functions are found where the command is typed
    sys.exit(start(RankPlace.from_environment(os.environ)))
