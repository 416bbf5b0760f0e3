"""Supports that cannot be: each message names the sample and the token."""

import numpy as np
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.ppo_utils.support_checks import validate_support

# samples 70 (2 tokens) and 71 (3 tokens, the middle one masked)
GOOD = {
    "support_ids": [1, 2, 0, 5, 9, 3],
    "support_counts": [2, 1, 2, 0, 1],
    "labels": [2, 0, 5, 8, 3],
    "mask": [True, True, True, False, True],
}


def _check(**changes: list[int]) -> None:
    columns = {name: np.asarray(value) for name, value in (GOOD | changes).items()}
    validate_support(**columns, lens=np.array([2, 3]), sample_ids=[70, 71], vocab_size=10)


def test_validate_support_good_rows_and_an_empty_masked_row_pass() -> None:
    _check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"support_ids": [1, 2, 0, 5, 10, 3]}, r"response token 0 of sample 71 holds id 10; expected ids in \[0, 10\)"),
        ({"support_ids": [1, 2, -1, 5, 9, 3]}, r"response token 1 of sample 70 holds id -1"),
        ({"support_ids": [1, 2, 0, 5, 5, 3]}, r"response token 0 of sample 71 holds id 5 more than once"),
        ({"support_ids": [1, 2, 0, 5, 9, 4]}, r"response token 2 of sample 71 holds 1 ids, but not the sampled token 3"),
        ({"mask": [True, True, True, True, True]}, r"response token 1 of sample 71 holds 0 ids, but not the sampled token 8"),
        ({"support_counts": [2, 1, 2, 0, 2]}, r"add up to 7, but 6 support ids"),
        ({"support_counts": [2, 1, 2, -1, 2]}, r"response token 1 of sample 71 has -1 ids"),
        ({"support_counts": [2, 1, 3]}, r"3 counts for 5 sampled tokens"),
    ],
)
def test_validate_support_bad_input_names_it(changes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        _check(**changes)
