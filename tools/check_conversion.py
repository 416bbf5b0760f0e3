"""Compare two folders of one model: Hugging Face or torch_dist, each read as it is.

Weights tensor by tensor, shown by layer, and the logits on a prompt by transformers, for which a torch_dist
folder is exported to a temporary folder first. Where types differ, the wider is rounded to the narrower.
Exit code 0: nothing differs by more than --tolerance; 1: something does; 2: a folder is not whole.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_ppo.conversion.console import progress_bar, run_tool, tool_parser
from slime_ppo.errors import SlimePpoError

if TYPE_CHECKING:
    import torch

    from slime_ppo.conversion.compare import OpenedModel, TensorDifference

EXAMPLE = """example:
  python tools/check_conversion.py /models/Qwen3-4B runs/qwen3-4b/actor --prompt "1 + 1 ="
  python tools/check_conversion.py /models/Qwen3-4B /checkpoints/qwen3-4b --no-logits"""
PROMPT = "The quick brown fox jumps over the lazy dog."


def main(argv: Sequence[str]) -> int:
    return run_tool(_parser(), _check, argv)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, EXAMPLE)
    parser.add_argument("first", metavar="A", type=Path, help="Hugging Face or torch_dist folder")
    parser.add_argument("second", metavar="B", type=Path, help="Hugging Face or torch_dist folder")
    parser.add_argument(
        "--hf-folder", metavar="DIR", type=Path, help="config.json and tokenizer, for a torch_dist folder that brings none"
    )
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT, help=f"what the logits are of; default: {PROMPT!r}")
    parser.add_argument("--no-logits", action="store_true", help="compare weights alone, which needs no transformers")
    parser.add_argument("--all", action="store_true", help="show every tensor, not only those that differ")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, default=0.0, help="largest absolute difference of weights that passes (default 0)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check that both folders are whole and of one model, and stop")
    return parser


def _check(args: argparse.Namespace) -> int:
    from slime_ppo.conversion.compare import differences, open_model

    models = [open_model(path, args.hf_folder) for path in (args.first, args.second)]
    for name, model in zip("AB", models, strict=True):
        kind = "torch_dist" if model.is_torch_dist else "Hugging Face"
        what = f"{model.table.shape.model_type} {model.table.head.replace('_', ' ')}"
        print(f"{name}  {model.folder}: {what}, {kind}, {len(model.names)} tensors")
    first, second = models
    only = [("A", one) for one in first.names if one not in second.names]
    only += [("B", one) for one in second.names if one not in first.names]
    for name, one in only:
        print(f"only in {name}: {one}")
    if args.dry_run:
        print("dry run: nothing compared")
        return 1 if only else 0
    found = []
    with progress_bar(len(first.names), "comparing", unit=" tensors") as progress:
        for one in differences(first, second):
            found.append(one)
            progress(1)
    passed = _report(first, found, args) and not only
    if not args.no_logits:
        passed = _report_logits(first, second, args.prompt) and passed
    return 0 if passed else 1


def _report(model: "OpenedModel", found: "list[TensorDifference]", args: argparse.Namespace) -> bool:
    """Print the weights' table; whether all are within the tolerance."""
    from slime_ppo.conversion.compare import layer_of

    part_of = layer_of(model.table)
    parts: dict[str, list[TensorDifference]] = {}
    for one in found:
        parts.setdefault(part_of[one.name], []).append(one)
    width = max(len(one) for one in [*parts, *(("  " + one.name) for one in found if args.all or not one.equal)])
    print(f"{'':{width}}  equal  largest |A - B|  largest |value|")
    for part, members in parts.items():
        print(f"{part:{width}}  {_row(members)}")
        for one in members:
            if args.all or not one.equal:
                print(f"  {one.name:{width - 2}}  {_row([one])}")
    wrong = [one for one in found if not (one.equal or one.largest <= args.tolerance)]
    rounded = sorted(
        {" and ".join(str(dtype).removeprefix("torch.") for dtype in one.dtypes) for one in found if len(set(one.dtypes)) > 1}
    )
    after = f" (compared in the narrower of {', '.join(rounded)})" if rounded else ""
    if wrong:
        print(f"weights: {len(wrong)} of {len(found)} tensors differ{after}, first {wrong[0].name}")
    elif all(one.equal for one in found):
        print(f"weights: all {len(found)} tensors are equal bit for bit{after}")
    else:
        print(f"weights: all {len(found)} tensors are within {args.tolerance:g}{after}")
    return not wrong


def _row(members: "list[TensorDifference]") -> str:
    largest = max((one.largest for one in members), key=lambda value: math.inf if math.isnan(value) else value)
    scale = max((one.scale for one in members), key=lambda value: math.inf if math.isnan(value) else value)
    equal = f"{sum(one.equal for one in members)}/{len(members)}"
    return f"{equal:>5}  {largest:15.3e}  {scale:15.3e}"


def _report_logits(first: "OpenedModel", second: "OpenedModel", prompt: str) -> bool:
    """Print how far the outputs on the prompt are apart; whether they are finite, and those of equal models equal."""
    ids, text = _prompt_ids(first, prompt)
    one, other = _logits(first, ids), _logits(second, ids)
    if one.shape != other.shape:
        print(f"logits: of shape {list(one.shape)} in A, {list(other.shape)} in B")
        return False
    gap, scale = (one - other).abs().max().item(), one.abs().max().item()
    alike = (one.argmax(-1) == other.argmax(-1)).sum().item()
    what = "score" if first.table.head == "value" else f"logits at {len(ids)} tokens"
    best = "" if first.table.head == "value" else f", the same most likely token at {alike} of {len(ids)}"
    print(f"{what} of {text}: largest difference {gap:.3e}, largest value {scale:.3e}{best}")
    return math.isfinite(gap)


def _prompt_ids(model: "OpenedModel", prompt: str) -> tuple[list[int], str]:
    """Token ids, and words for what they are: without a tokenizer, ids one after the other."""
    file = model.config_folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(file)).encode(prompt).ids
        if not ids or max(ids) >= model.table.shape.vocab_size:
            what = f"token {max(ids)} of a vocabulary of {model.table.shape.vocab_size}" if ids else "no tokens"
            raise SlimePpoError(f"--prompt {prompt!r} is {what} by {file}: give another one, or compare weights with --no-logits")
        return ids, repr(prompt)
    count = min(32, model.table.shape.vocab_size)
    return list(range(count)), f"the token ids 0 to {count - 1} ({model.config_folder} has no tokenizer.json)"


def _logits(model: "OpenedModel", ids: list[int]) -> "torch.Tensor":
    """By transformers, in float32: [T, V], or [1, 1] of a critic, which scores the whole prompt."""
    if not model.is_torch_dist:
        return _hf_logits(model.folder, ids, critic=model.table.head == "value")
    from slime_ppo.conversion.convert import plan_hf, write_hf_folder

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        plan = plan_hf(model.folder, companion=model.config_folder, dtype=None, max_file_bytes=5 * 10**9)
        with progress_bar(plan.num_bytes, "exporting") as progress:
            write_hf_folder(plan, folder, progress)
        return _hf_logits(folder, ids, critic=model.table.head == "value")


def _hf_logits(folder: Path, ids: list[int], *, critic: bool) -> "torch.Tensor":
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    auto = AutoModelForSequenceClassification if critic else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits
    return found.reshape(-1, found.shape[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
