"""A Hugging Face folder as a Megatron torch_dist checkpoint: actor, critic or reward model.

Needs no GPU, no ranks and no Megatron, and holds one tensor at a time. config.json says what it is:
a ...ForCausalLM becomes an actor, a ...ForSequenceClassification of one label a critic. OUT holds
iter_0000000/, and hf/ with config and tokenizer; training takes it with --load or --critic-load.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime_ppo.conversion.console import progress_bar, require_empty, run_tool, size_words, tool_parser
from slime_ppo.errors import SlimePpoError

EXAMPLE = """example:
  python tools/convert_hf_to_torch_dist.py /models/Qwen3-4B /checkpoints/qwen3-4b --dtype bfloat16"""
MAX_DIVISOR = 1 << 20


def main(argv: Sequence[str]) -> int:
    return run_tool(_parser(), _convert, argv)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, EXAMPLE)
    parser.add_argument("source", metavar="HF_FOLDER", type=Path, help="folder with config.json and safetensors weights")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; it appears when it is whole")
    parser.add_argument(
        "--dtype",
        choices=("same", "float32", "bfloat16"),
        default="same",
        help="type of the weights that are written (a critic's head is float32); default: as stored, tensor by tensor",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        metavar="N",
        type=int,
        default=1,
        help="pad embedding and output layer with rows of zeros, for tools that cannot; training here pads by itself (default 1)",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier conversion in OUT; nothing else is ever replaced")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be written, and stop")
    return parser


def _convert(args: argparse.Namespace) -> int:
    if not 1 <= args.make_vocab_size_divisible_by <= MAX_DIVISOR:
        raise SlimePpoError(f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by}: expected 1 to {MAX_DIVISOR:,}")
    require_empty(args.out, force=args.force)
    import torch  # after the arguments are known to be right

    from slime_ppo.conversion.convert import plan_torch_dist, write_torch_dist_folder

    dtype = None if args.dtype == "same" else getattr(torch, args.dtype)
    start = time.perf_counter()
    plan = plan_torch_dist(args.source, dtype=dtype, make_vocab_size_divisible_by=args.make_vocab_size_divisible_by)
    kind = "critic" if plan.table.head == "value" else "actor"
    print(
        f"{args.source}: {plan.table.shape.model_type} {kind}, {plan.num_tensors} Megatron tensors, {size_words(plan.num_bytes)} "
        "to write"
    )
    plan.check_output(args.out)
    if args.dry_run:
        print(f"dry run: nothing written to {args.out}")
        return 0
    with progress_bar(plan.num_bytes, "writing") as progress:
        write_torch_dist_folder(plan, args.out, progress)
    print(f"{args.out}: written in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
