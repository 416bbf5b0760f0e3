"""Supports that cannot be: each message names the sample and the token."""

import numpy as np
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.ppo_utils.support_checks import validate_support

# samples 70 (2 tokens), 72 (none) and 71 (3 tokens, the middle one masked)
GOOD = {
    "support_ids": [1, 2, 0, 5, 9, 3],
    "support_counts": [2, 1, 2, 0, 1],
    "labels": [2, 0, 5, 8, 3],
    "mask": [True, True, True, False, True],
}
# the second token was drawn from the whole vocabulary
MARKED = {
    "support_ids": [1, 2, 5, 9, 3],
    "support_counts": [2, 0, 2, 0, 1],
    "unrestricted": [False, True, False, False, False],
}


def _check(**changes: list[int]) -> None:
    columns = {name: np.asarray(value) for name, value in (GOOD | changes).items()}
    validate_support(**columns, lens=np.array([2, 0, 3]), sample_ids=[70, 72, 71], vocab_size=10)


def test_validate_support_good_rows_and_an_empty_masked_row_pass() -> None:
    _check()


def test_validate_support_masked_row_without_the_sampled_token_passes() -> None:
    _check(support_ids=[1, 2, 0, 5, 9, 4, 3], support_counts=[2, 1, 2, 1, 1])


def test_validate_support_unrestricted_rows_pass_trainable_or_masked() -> None:
    _check(**MARKED)
    _check(**MARKED | {"unrestricted": [False, True, False, True, False]})


def test_validate_support_without_tokens_passes() -> None:
    none = np.zeros(0, np.int64)
    validate_support(none, none, none, none, lens=none, sample_ids=[], vocab_size=10, unrestricted=none)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_validate_support_same_id_in_two_rows_of_a_large_vocabulary_passes(dtype: type) -> None:
    ids = np.full(70_000, 151_935, dtype)
    ones = np.ones(70_000, dtype)
    validate_support(ids, ones, ids, ones > 0, lens=np.array([70_000]), sample_ids=[0], vocab_size=151_936)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"support_ids": [1, 2, 0, 5, 10, 3]}, r"response token 0 of sample 71 holds id 10; expected ids in \[0, 10\)"),
        ({"support_ids": [1, 2, -1, 5, 9, 3]}, r"response token 1 of sample 70 holds id -1"),
        ({"support_ids": [1, 2, 0, 5, 5, 3]}, r"response token 0 of sample 71 holds id 5 more than once"),
        ({"support_ids": [1, 2, 0, 5, 9, 4]}, r"response token 2 of sample 71 holds 1 ids, but not the sampled token 3"),
        ({"mask": [True, True, True, True, True]}, r"response token 1 of sample 71 is empty, but the token is trainable.* 8 among"),
        ({"support_counts": [2, 1, 2, 0, 2]}, r"samples 70 to 71 add up to 7, but 6 support ids"),
        ({"support_counts": [2, 1, 2, -1, 2]}, r"response token 1 of sample 71 has -1 ids"),
        ({"support_counts": [2, 1, 3]}, r"3 counts and 3 unrestricted marks for 5 sampled tokens"),
        ({"mask": [True]}, r"1 mask entries and responses of 5 tokens"),
        ({"unrestricted": [True]}, r"1 unrestricted marks"),
        ({"unrestricted": [False, True, False, False, False]}, r"token 1 of sample 70 is marked unrestricted, but holds 1 ids"),
        (MARKED | {"unrestricted": [False] * 5}, r"response token 1 of sample 70 is empty"),
        (MARKED | {"labels": [2, 10, 5, 8, 3]}, r"token 1 of sample 70 holds all 10 ids .* but not the sampled token 10"),
        (MARKED | {"labels": [2, -1, 5, 8, 3]}, r"token 1 of sample 70 holds all 10 ids .* but not the sampled token -1"),
    ],
)
def test_validate_support_bad_input_names_it(changes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        _check(**changes)
