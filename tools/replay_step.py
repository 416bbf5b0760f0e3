"""Replay the training steps of a rollout file (--save-debug-rollout-data) in several layouts, on gloo ranks of this machine's CPU,
and compare: every layout should compute what the first one does.

    python tools/replay_step.py runs/dumps/rollout_0000000.npz --weights runs/models/glass-en --layouts 1 tp2 pp2 dp2-mbs1
    python tools/replay_step.py runs/dumps/rollout_0000003.npz --with-optimizer --weights runs/a/actor/iter_0000003 \\
        --critic-weights runs/a/critic/iter_0000003 --num-steps 1

The file brings samples, columns, step plan and learning rates, and the config of its run; the weights are those that the rollout
started from. The optimizer starts anew, or with --with-optimizer from the checkpoints. A layout is a list of sizes: tp, cp, pp, dp,
ep, etp, vpp (virtual stages) and mbs (samples per micro-batch), as in tp2-dp2; 1 is one rank. "off by" is the largest error of a
step's metrics relative to max(|metric|, 0.1) of the first layout, "weights" the largest difference of a weight after the last step
in units of the largest learning rate.
Exit code 1 when a layout is beyond --tolerance or --weights-tolerance, 2 for input that cannot be replayed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError, SlimePpoError
from slime_ppo.rollout.dump import read_dump
from tools.layouts.replay import RANKS, Layout, Start, Tolerance, checked, config_of, replay, training_of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay_step.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path, help="a file of --save-debug-rollout-data, of a run that trained")
    what = "Hugging Face folder or torch_dist checkpoint"
    parser.add_argument("--weights", metavar="FOLDER", help=f"{what}: the actor at the beginning of the rollout")
    parser.add_argument(
        "--critic-weights", metavar="FOLDER", help="the critic, likewise; without one of the two its role is left out"
    )
    parser.add_argument("--layouts", nargs="+", default=["1", "tp2", "pp2", "dp2"], metavar="SIZES", help="[1 tp2 pp2 dp2]")
    parser.add_argument("--num-steps", type=int, metavar="N", help="the first N steps of the rollout [all]")
    parser.add_argument("--tolerance", type=float, default=5e-5, help="of metrics [5e-5]")
    parser.add_argument("--weights-tolerance", type=float, default=0.1, help="in learning rates per step [0.1]")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of weights [that of the run]")
    parser.add_argument("--with-optimizer", action="store_true", help="take over the optimizer's state from torch_dist, too")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would run, and exit")
    return parser


def run(options: argparse.Namespace) -> int:
    """Check, replay, compare. Returns the exit code."""
    given: dict[RoleName, str | None] = {"actor": options.weights, "critic": options.critic_weights}
    starts = {role: Start.of(folder) for role, folder in given.items() if folder is not None}
    if not starts:
        raise ConfigError("nothing to replay: give --weights, --critic-weights, or both")
    if options.with_optimizer and not all(start.checkpoint for start in starts.values()):
        raise ConfigError("--with-optimizer needs torch_dist checkpoints: a Hugging Face folder has no optimizer's state")
    dump = read_dump(options.file)
    training = training_of(dump, list(starts), options.num_steps)
    config = config_of(dump, options.file, starts)
    if options.dtype is not None:
        config = replace(config, model=replace(config.model, dtype=options.dtype))
    configs = {layout.name: checked(config, layout, list(starts)) for layout in map(Layout.parse, options.layouts)}
    print(f"rollout {dump.header.rollout_id}: {len(training.plan.steps)} steps of {' and '.join(starts)} in {config.model.dtype}")
    print("layouts: " + ", ".join(f"{name} on {_ranks_text(one)}" for name, one in configs.items()))
    if options.dry_run:
        return 0
    from tests.helpers.rank_pool import RankPool

    with RankPool(["tools.layouts.quiet", RANKS]) as pool:
        compared = replay(pool, configs, training, starts, with_optimizer=options.with_optimizer)
    print(compared.text())
    agrees = compared.agrees(Tolerance(options.tolerance, options.weights_tolerance))
    print("all layouts agree" if agrees else "layouts differ by more than the tolerance")
    return 0 if agrees else 1


def _ranks_text(config: Config) -> str:
    num_ranks = config.role("actor").num_ranks
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return run(options)
    except SlimePpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
