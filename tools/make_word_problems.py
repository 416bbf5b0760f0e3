"""python tools/make_word_problems.py OUT: arithmetic word problems in GSM8K's format, for a first run with `--rm-type math`.

Each row has "question" and "answer"; the answer shows the steps and ends in "#### 72". No two questions are alike, and the same
--seed gives the same rows. For rows to train on and rows to evaluate on, take slices of one file:

    python tools/make_word_problems.py runs/data/sums.jsonl --rows 2000
    python scripts/train_ppo.py --prompt-data 'runs/data/sums.jsonl@[:1800]' --eval-prompt-data 'runs/data/sums.jsonl@[1800:]' \\
        --input-key question --label-key answer --rm-type math --hf-checkpoint MODEL
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NAMES = ("Ada", "Bela", "Carl", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena", "Milo", "Nora", "Otto", "Pia")
THINGS = ("apples", "stamps", "marbles", "pencils", "shells", "buttons", "cards", "plums", "candles", "ribbons")
PLACES = ("market", "harbour", "library", "station", "mill", "school")
# the kind with the fewest forms has 32,000: new ones are found fast up to here
MOST_ROWS = 100_000

Problem = tuple[str, str, int]


class MakeError(Exception):
    """What is wrong and what to do."""


def give_and_get(draw: random.Random) -> Problem:
    """A sum and a difference."""
    first, second = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    had, got = draw.randint(10, 90), draw.randint(2, 40)
    gave = draw.randint(1, had)
    question = (
        f"{first} has {had} {thing}. {second} takes {gave} of them, and at the {draw.choice(PLACES)} {first} finds {got} more. "
        f"How many {thing} does {first} have now?"
    )
    return question, f"{had} - {gave} = {had - gave}. Then {had - gave} + {got} = {had - gave + got}.", had - gave + got


def boxes(draw: random.Random) -> Problem:
    """A product and a difference."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    num_boxes, each = draw.randint(2, 12), draw.randint(3, 25)
    sold = draw.randint(1, num_boxes * each)
    question = (
        f"{name} packs {num_boxes} boxes with {each} {thing} in each and sells {sold} {thing} at the {draw.choice(PLACES)}. "
        f"How many {thing} are left?"
    )
    total = num_boxes * each
    return question, f"{num_boxes} x {each} = {total}. Then {total} - {sold} = {total - sold}.", total - sold


def shares(draw: random.Random) -> Problem:
    """A quotient without a remainder."""
    first, second = draw.sample(NAMES, 2)
    thing, friends, each = draw.choice(THINGS), draw.randint(2, 9), draw.randint(2, 20)
    total = friends * each
    mine = draw.randint(1, total - 1)
    question = (
        f"{first} brings {mine} {thing} and {second} brings {total - mine}. They share them equally among {friends} friends. How "
        f"many {thing} does each friend get?"
    )
    return question, f"{mine} + {total - mine} = {total}. Then {total} / {friends} = {each}.", each


def walks(draw: random.Random) -> Problem:
    """Two products and a sum."""
    name, days, far, more = draw.choice(NAMES), draw.randint(2, 7), draw.randint(2, 15), draw.randint(2, 5)
    question = (
        f"{name} walks {far} km to the {draw.choice(PLACES)} and the same way back, on {days} days. On one more day {name} walks "
        f"{more} times as far as on one of these. How many km is that in all?"
    )
    daily = 2 * far
    steps = f"2 x {far} = {daily}. {days} x {daily} = {days * daily}. {more} x {daily} = {more * daily}. "
    total = days * daily + more * daily
    return question, f"{steps}Then {days * daily} + {more * daily} = {total}.", total


KINDS: tuple[Callable[[random.Random], Problem], ...] = (give_and_get, boxes, shares, walks)


def problems(num_rows: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows in GSM8K's format, the kinds in turn."""
    draw, seen = random.Random(seed), set[str]()
    while len(seen) < num_rows:
        question, steps, result = KINDS[len(seen) % len(KINDS)](draw)
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": f"{steps}\n#### {result}"}


def write(out: Path, num_rows: int, seed: int, *, force: bool) -> None:
    """Write the file beside its place and move it there when it is whole. Raises MakeError when it exists, unless `force`."""
    if out.exists() and not force:
        raise MakeError(f"{out} exists; choose another name, or replace it with --force")
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in problems(num_rows, seed))
        os.replace(beside, out)
    except OSError as error:
        raise MakeError(f"{out} cannot be written: {error.strerror}. Choose another place") from error
    finally:
        beside.unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="file to write, JSON Lines")
    parser.add_argument("--rows", type=int, default=2000, help=f"questions, at most {MOST_ROWS}")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other questions")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument("--dry-run", action="store_true", help="show the first four rows, write nothing")
    args = parser.parse_args(argv)
    if not 1 <= args.rows <= MOST_ROWS:
        parser.error(f"--rows {args.rows}: expected 1 to {MOST_ROWS}")
    if args.dry_run:
        print(*(json.dumps(row, indent=2) for row in problems(min(args.rows, len(KINDS)), args.seed)), sep="\n")
        return 0
    try:
        write(args.out, args.rows, args.seed, force=args.force)
    except MakeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.rows} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
