"""Samples of a rollout file (--save-debug-rollout-data) in the terminal, token by token.

    python tools/inspect_rollout.py runs/dumps/rollout_0000003.npz
    python tools/inspect_rollout.py runs/dumps/rollout_0000003.npz --worst-gap --num 3
    python tools/inspect_rollout.py runs/dumps/rollout_0000003.npz --sample-id 52 --hf-checkpoint runs/models/glass-en | less

Columns: engine = log-prob under the sampler, old = the actor's, ref = the reference's, gap = old - engine; those that the file does
not have are left out. Without its tokenizer a token is shown as its id.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_ppo.data.tokenizer import load_tokenizer
from slime_ppo.errors import DataError, SlimePpoError
from slime_ppo.rollout.dump import RolloutDump, read_dump
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import Sample

# heading -> column of RolloutBatch, in the order of the table
_COLUMNS = {
    "engine": "rollout_log_probs",
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "entropy": "entropy",
    "value": "values",
    "reward": "token_rewards",
    "return": "returns",
    "advantage": "advantages",
    "weight": "rollout_weights",
}
_SIGNED = ("advantage",)
_DIM, _RED, _GREEN, _BOLD, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[1m", "\x1b[0m"

TokenTexts = Callable[[np.ndarray], Sequence[str]]


def summary(path: Path, dump: RolloutDump, batch: RolloutBatch) -> str:
    """One rollout in a few lines."""
    made = "samples only" if dump.training is None else f"samples, columns and {len(dump.training.plan.steps)} planned steps"
    lines = [
        f"{path}: rollout {dump.header.rollout_id}, {made}",
        f"{batch.num_samples} samples, {len(batch.response_ids)} response tokens, {int(batch.loss_mask.sum())} of them trainable; "
        f"reward {batch.rewards.mean():.4g} (min {batch.rewards.min():.4g}, max {batch.rewards.max():.4g})",
    ]
    if dump.training is not None:
        rates = {role: rates[0] for role, rates in dump.training.learning_rates.items() if rates}
        lines.append(f"kl_coef {dump.training.kl_coef:g}; first lr " + ", ".join(f"{role} {lr:g}" for role, lr in rates.items()))
    return "\n".join(lines)


def gaps(batch: RolloutBatch) -> np.ndarray:
    """Per sample the largest |old - engine| of a trainable token, 0 without any. Raises DataError without old log-probs."""
    if batch.old_log_probs is None:
        raise DataError("--worst-gap: the file has no old log-probs yet; it was saved before training had made them")
    gap = np.where(batch.loss_mask, np.abs(batch.old_log_probs - batch.rollout_log_probs), 0.0)
    offsets = batch.offsets("response_token")
    return np.array([gap[start:end].max(initial=0.0) for start, end in zip(offsets[:-1], offsets[1:], strict=True)])


def chosen_rows(batch: RolloutBatch, *, sample_ids: Sequence[int], worst_gap: bool, num: int) -> list[int]:
    """Rows of the samples to show. Raises DataError for an id that is not there."""
    rows = list(range(batch.num_samples))
    if sample_ids:
        row_of = {sample_id: row for row, sample_id in enumerate(batch.sample_ids.tolist())}
        missing = [one for one in sample_ids if one not in row_of]
        if missing:
            raise DataError(f"--sample-id {missing[0]}: not in this rollout, which has samples {min(row_of)} to {max(row_of)}")
        rows = [row_of[one] for one in sample_ids]
        num = len(rows)
    if worst_gap:
        found = gaps(batch)
        rows.sort(key=lambda row: -found[row])
    return rows[:num]


def sample_text(sample: Sample, one: RolloutBatch, token_texts: TokenTexts | None, *, colour: bool) -> str:
    """A sample with its tokens as a table; `one` holds its columns alone."""
    versions = ", ".join(str(span.version) for span in sample.weight_versions)
    head = (
        f"sample {sample.sample_id}  group {sample.group_id}  reward {one.rewards[0]:.4g}  finish {sample.finish.value}  "
        f"{one.prompt_lens[0]} + {one.response_lens[0]} tokens  weight version {versions}"
    )
    lines = [_painted(head, _BOLD, colour), f"prompt    {sample.prompt.text!r}", f"response  {sample.response_text!r}"]
    if sample.prompt.label is not None:
        lines.append(f"label     {sample.prompt.label!r}")
    return "\n".join([*lines, *_token_table(one, token_texts, colour=colour)])


def _token_table(one: RolloutBatch, token_texts: TokenTexts | None, *, colour: bool) -> Iterator[str]:
    ids = one.response_ids
    texts = [str(token) for token in ids.tolist()] if token_texts is None else [repr(text) for text in token_texts(ids)]
    columns = {heading: getattr(one, name) for heading, name in _COLUMNS.items() if getattr(one, name) is not None}
    if one.old_log_probs is not None:
        columns["gap"] = one.old_log_probs - one.rollout_log_probs
    if one.support_counts is not None:
        columns["support"] = one.support_counts
    width = max(len("token"), *map(len, texts))
    yield "  ".join(["   #", "token".ljust(width), "mask", *(f"{heading:>9}" for heading in columns)])
    for position, text in enumerate(texts):
        trainable = bool(one.loss_mask[position])
        cells = [_cell(heading, column[position], colour=colour and trainable) for heading, column in columns.items()]
        line = "  ".join([f"{position:>4}", text.ljust(width), f"{int(trainable):>4}", *cells])
        yield line if trainable else _painted(line, _DIM, colour)


def _cell(heading: str, value: float, *, colour: bool) -> str:
    text = f"{value:>9d}" if heading == "support" else f"{value:>9.1e}" if heading == "gap" else f"{value:>9.4f}"
    return _painted(text, _GREEN if value > 0 else _RED, colour and heading in _SIGNED)


def _painted(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_PLAIN}" if colour else text


def _token_texts(dump: RolloutDump, folder: str | None) -> TokenTexts | None:
    """The tokenizer of the folder that was named, or of the run if it is still there."""
    of_run = yaml.safe_load(dump.header.config)["model"]["hf_checkpoint"]
    if folder is None and not Path(of_run, "tokenizer.json").is_file():
        return None
    return load_tokenizer(folder or of_run).token_strings


def show(options: argparse.Namespace) -> None:
    """Print the summary and the samples that were asked for."""
    dump = read_dump(options.file)
    batch = RolloutBatch.from_samples(dump.header.rollout_id, dump.samples) if dump.training is None else dump.training.batch
    rows = chosen_rows(batch, sample_ids=options.sample_id, worst_gap=options.worst_gap, num=options.num)
    token_texts = _token_texts(dump, options.hf_checkpoint)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(summary(options.file, dump, batch))
    for row in () if options.dry_run else rows:
        print("\n" + sample_text(dump.samples[row], batch.select([row]), token_texts, colour=colour))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="inspect_rollout.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path, help="a file of --save-debug-rollout-data")
    parser.add_argument("--sample-id", type=int, action="append", default=[], metavar="N", help="this sample; may be repeated")
    parser.add_argument("--worst-gap", action="store_true", help="the samples on which engine and actor differ most, first")
    parser.add_argument("--num", type=int, default=1, metavar="N", help="how many samples to show [1]; 0 = the summary alone")
    parser.add_argument("--hf-checkpoint", metavar="FOLDER", help="model folder with the tokenizer [that of the run]")
    parser.add_argument("--dry-run", action="store_true", help="read and check the file, and print its summary alone")
    options = parser.parse_args(argv)
    if options.num < 0:
        parser.error(f"--num {options.num}: expected a number of samples, 0 or more")
    try:
        show(options)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SlimePpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
