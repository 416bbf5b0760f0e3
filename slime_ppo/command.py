"""What the scripts that train do: rank 0 runs the command line, the others do what it says."""

import sys
from functools import partial

from slime_ppo.config.cli import CommandLine, ParsedCommand, print_config_text, run_cli
from slime_ppo.config.launcher import RankPlace, chosen_launcher
from slime_ppo.orchestration.local_world import LocalWorld


def start(line: CommandLine, place: RankPlace) -> int:
    """Run the command line of this process. Returns the exit code."""
    if place.rank > 0:
        from slime_ppo.orchestration.local_ranks import serve_rank

        return serve_rank(place)
    world, code = LocalWorld(place), 1
    try:
        code = run_cli(sys.argv[1:], partial(main, world), line)
    except SystemExit as end:  # --help
        code = 1 if end.code else 0
    except KeyboardInterrupt:  # before the run had begun
        code = 130
    finally:
        world.end(code)
    return code


def main(world: LocalWorld, command: ParsedCommand) -> int:
    """Print what was asked for, or train."""
    if command.print_config:
        sys.stdout.write(print_config_text(command))
        return 0
    launcher = chosen_launcher(command.config, world.place)
    if command.dry_run:
        from slime_ppo.config.dry_run import dry_run_report
        from slime_ppo.config.preflight import preflight
        from slime_ppo.orchestration.engine_settings import check_sglang

        shapes = preflight(command.config)
        check_sglang(command.config)
        sys.stdout.write(dry_run_report(command.config, shapes.actor, critic_shape=shapes.critic, launcher=launcher))
        return 0
    if launcher == "ray":
        from slime_ppo.orchestration.ray_environment import prepare_ray_environment

        prepare_ray_environment(command.config.cluster)
    from slime_ppo.launch import run_job  # may import Ray, which reads the environment

    return run_job(command.config, launcher, world)
