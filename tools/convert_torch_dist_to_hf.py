"""A Megatron torch_dist checkpoint as a Hugging Face folder: training's, a converted one, or Megatron-LM's.

Needs no GPU, no ranks and no Megatron, and holds one tensor at a time. Padding of the vocabulary is cut
off; an output layer that is tied to the embedding is not stored twice; a critic becomes a
...ForSequenceClassification of one label. Optimizer and random states are passed over.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime_ppo.conversion.console import parse_size, progress_bar, require_empty, run_tool, size_words, tool_parser

EXAMPLE = """example:
  python tools/convert_torch_dist_to_hf.py runs/qwen3-4b/actor /models/qwen3-4b-ppo --dtype bfloat16"""


def main(argv: Sequence[str]) -> int:
    return run_tool(_parser(), _convert, argv)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, EXAMPLE)
    parser.add_argument(
        "source",
        metavar="CHECKPOINT",
        type=Path,
        help="folder of one checkpoint (iter_...), or the one above it, whose latest is taken",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; it appears when it is whole")
    parser.add_argument(
        "--hf-folder", metavar="DIR", type=Path, help="config.json and tokenizer of the model; default: those beside the weights"
    )
    parser.add_argument(
        "--dtype",
        choices=("same", "float32", "bfloat16", "float16"),
        default="same",
        help="type of the weights that are written; default: as stored, tensor by tensor",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a safetensors file, as in 500MB (default 5GB)")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in OUT; nothing else is ever replaced")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be written, and stop")
    return parser


def _convert(args: argparse.Namespace) -> int:
    require_empty(args.out, force=args.force)
    max_file_bytes = parse_size(args.max_shard_size)
    import torch  # after the arguments are known to be right

    from slime_ppo.conversion.convert import plan_hf, write_hf_folder

    dtype = None if args.dtype == "same" else getattr(torch, args.dtype)
    start = time.perf_counter()
    plan = plan_hf(args.source, companion=args.hf_folder, dtype=dtype, max_file_bytes=max_file_bytes)
    kind = "critic" if plan.table.head == "value" else "actor"
    print(
        f"{plan.weights.reader.folder}: {plan.table.shape.model_type} {kind}, {plan.num_tensors} Hugging Face tensors, "
        f"{size_words(plan.num_bytes)} in {len(plan.files)} file{'s' if len(plan.files) > 1 else ''} to write"
    )
    plan.check_output(args.out)
    if args.dry_run:
        print(f"dry run: nothing written to {args.out}")
        return 0
    with progress_bar(plan.num_bytes, "writing") as progress:
        write_hf_folder(plan, args.out, progress)
    print(f"{args.out}: written in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
