"""Show what a checkpoint holds: names, shapes, types and sizes of its tensors as a tree, and what is missing.

PATH is a Hugging Face folder, a torch_dist folder (of training, converted, or Megatron-LM's), or a run folder,
whose checkpoints are listed and whose files are checked against the sizes they were written with. Only headers
are read, unless --hash asks for more. Exit code 0: whole; 1: something is missing, too much or of another shape;
2: unreadable.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_ppo.checkpoint.files import size_problems
from slime_ppo.checkpoint.run_state import Checkpoint, RunState, SavedState
from slime_ppo.conversion.console import progress_bar, run_tool, size_words, tool_parser
from slime_ppo.errors import CheckpointError

if TYPE_CHECKING:
    from slime_ppo.conversion.contents import Contents

EXAMPLE = """example:
  python tools/inspect_checkpoint.py runs/qwen3-4b
  python tools/inspect_checkpoint.py runs/qwen3-4b/actor --depth 2
  python tools/inspect_checkpoint.py /models/Qwen3-4B --hash"""


def main(argv: Sequence[str]) -> int:
    return run_tool(_parser(), _inspect, argv)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, EXAMPLE)
    parser.add_argument("path", metavar="PATH", type=Path, help="the folder to look at")
    parser.add_argument("--hash", action="store_true", help="read every tensor and show the sha256 of its bytes (16 digits)")
    parser.add_argument("--all", action="store_true", help="every layer and every expert on lines of its own")
    parser.add_argument("--depth", metavar="N", type=int, help="levels of the tree to show, the rest as sums; default: all")
    parser.add_argument("--hf-folder", metavar="DIR", type=Path, help="config.json of a torch_dist folder that brings none")
    parser.add_argument("--dry-run", action="store_true", help="say what the folder is and whether it is whole, without the tree")
    return parser


def _inspect(args: argparse.Namespace) -> int:
    run_state = RunState.read(args.path)
    return _show_folder(args) if run_state is None else _show_run(args.path, run_state)


def _show_run(folder: Path, run_state: RunState) -> int:
    """The run's checkpoints, oldest first."""
    count = len(run_state.checkpoints)
    print(f"{folder}: run {run_state.run_id}, {count} checkpoint{'' if count == 1 else 's'}")
    problems = []
    for checkpoint in run_state.checkpoints:
        wrong, num_bytes = _check_files(folder, checkpoint)
        problems += wrong
        waiting = ", samples that wait for their training" if checkpoint.buffered else ""
        state = "whole" if not wrong else f"{len(wrong)} problem{'' if len(wrong) == 1 else 's'}"
        what = f"{' and '.join(checkpoint.folders)}, {size_words(num_bytes)}{waiting}"
        print(f"  after rollout {checkpoint.rollout_id}: {what}: {state}")
        for role, path in checkpoint.folders.items():
            print(f"    {role}: {folder / path}")
    return _show_problems(problems)


def _check_files(folder: Path, checkpoint: Checkpoint) -> tuple[list[str], int]:
    """(What is wrong with a checkpoint's files, bytes that were written)."""
    try:
        saved = SavedState.read(folder / checkpoint.state_file, checkpoint.state_sha256)
    except CheckpointError as error:
        return [str(error)], 0
    wrong = [one for role, sizes in saved.files.items() for one in size_problems(folder / checkpoint.folders[role], sizes)]
    if checkpoint.buffer_file is not None:
        buffer = folder / checkpoint.buffer_file
        wrong += size_problems(buffer.parent, {buffer.name: saved.buffer or 0})
    return wrong, sum(sum(sizes.values()) for sizes in saved.files.values()) + (saved.buffer or 0)


def _show_folder(args: argparse.Namespace) -> int:
    from slime_ppo.conversion.contents import read_contents
    from slime_ppo.conversion.tree import draw_tree, totals

    contents = read_contents(args.path, args.hf_folder)
    print(f"{contents.folder}: {contents.kind}, {_model_words(contents)}, {totals(contents.weights)}")
    if contents.states:
        print(f"besides weights: {len(contents.states)} entries, {size_words(sum(one.num_bytes for one in contents.states))}")
    if contents.num_extra_states:
        print(f"and {contents.num_extra_states} extra states of Megatron's modules, which are not shown")
    if not args.dry_run:
        if args.hash:
            with progress_bar(sum(one.num_bytes for one in (*contents.weights, *contents.states)), "hashing") as progress:
                contents = contents.with_digests(progress)
        for entries in filter(None, (contents.weights, contents.states)):
            print()
            print("\n".join(draw_tree(entries, fold=not args.all, depth=args.depth)))
        print()
    return _show_problems(contents.problems)


def _model_words(contents: "Contents") -> str:
    if contents.table is None:
        return "no config.json beside it says what should be there (--hf-folder)"
    return f"{contents.table.shape.model_type} {'critic or reward model' if contents.table.head == 'value' else 'language model'}"


def _show_problems(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main(sys.argv[1:]))
