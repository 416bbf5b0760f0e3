"""What the scripts that train do: rank 0 runs the command line, the others do what it says."""

import sys
from functools import partial

from slime_ppo.config.cli import CommandLine, ParsedCommand, print_config_text, run_cli
from slime_ppo.config.launcher import LauncherName, RankPlace, chosen_launcher
from slime_ppo.config.root import Config
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
        sys.stdout.write(_dry_run(command.config, launcher, world))
        return 0
    if launcher == "ray":
        from slime_ppo.orchestration.ray_environment import prepare_ray_environment

        prepare_ray_environment(command.config.cluster)
    from slime_ppo.launch import run_job  # may import Ray, which reads the environment

    return run_job(command.config, launcher, world)


def _dry_run(config: Config, launcher: LauncherName, world: LocalWorld) -> str:
    """What the run would do, when it has read its inputs as it would then. Nothing is written, and nobody but files is asked."""
    from slime_ppo.config.dry_run import dry_run_report
    from slime_ppo.inputs import read_inputs
    from slime_ppo.launch import launcher_for

    support = launcher_for(config, launcher, world).returns_support
    inputs = read_inputs(config, returns_support=support, asks_servers=False)
    begins = f"the run starts at its beginning, with the weights of {config.model.hf_checkpoint}"
    start = (inputs.start.text or begins, *inputs.start.changes, *inputs.left_out)
    return dry_run_report(config, inputs.shapes.actor, critic_shape=inputs.shapes.critic, launcher=launcher, start=start)
