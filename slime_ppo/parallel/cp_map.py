"""Which context-parallel rank owns which position, and where it keeps it. Numbers only: no torch, no process group.

Shapes: S samples, sample s of P_s prompt and R_s response tokens; N = sum R response tokens, n_r of them owned by rank r.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from slime_ppo.errors import ParallelError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LastPositions:
    """The samples `rows` [k] whose last position P + R - 1 a rank owns, and the `places` [k] of those in the rank's pack."""

    rows: Ints
    places: Ints


@dataclass(frozen=True, eq=False)
class CpMap:
    """The zigzag split of packed samples over `cp_size` ranks, for any lengths P >= 1, R >= 0 and any number of samples.

    A sample of L = P + R tokens is padded at its end to 2 cp chunks of equal size h = ceil(L / (2 cp)). Rank r holds chunks r
    and 2 cp - 1 - r of each sample, in this order, sample after sample: its pack. Under causal attention every rank so has
    the same work. With cp_size 1 nothing is split or padded. Response token i is *predicted* at sequence position
    P + i - 1, and the rank that holds that position owns the token, its log-prob, value and reward. A rank may own no
    token of a sample, or none at all.

    Example: cp_size 2, two samples with P = 2, R = 4 and P = 1, R = 1. L = 6 and 2, h = 2 and 1, padded lengths 8 and 4.

        padded pack    a0 a1 | a2 a3 | a4 a5 | -- -- || b0 | b1 | -- | --
        rank 0 holds   a0 a1 -- -- b0 --         token_index [0 1 6 7 8 11]
        rank 1 holds   a2 a3 a4 a5 b1 --         token_index [2 3 4 5 9 10]

    Tokens 0 to 3 of sample a are predicted at a1 a2 a3 a4, token 0 of sample b at b0: flat tokens 0 1 2 3 and 4.

        rank 0   response_index [0 4]    local_positions [1 4]    local_lens [1 1]
        rank 1   response_index [1 2 3]  local_positions [0 1 2]  local_lens [3 0]

    The last positions are a5 (rank 1, place 3) and b1 (rank 1, place 4): there stands the value after the response.
    """

    cp_size: int
    prompt_lens: Ints
    response_lens: Ints

    def __post_init__(self) -> None:
        if self.cp_size < 1:
            raise ParallelError(f"the context-parallel size is {self.cp_size}; expected a whole number >= 1")
        if self.prompt_lens.shape != self.response_lens.shape or self.prompt_lens.ndim != 1:
            raise ParallelError(
                f"prompt lengths have shape {self.prompt_lens.shape}, response lengths {self.response_lens.shape}; "
                "expected one of each per sample"
            )
        for name, lens, least in (("prompt", self.prompt_lens, 1), ("response", self.response_lens, 0)):
            if len(lens) and lens.min() < least:
                raise ParallelError(
                    f"the {name} of sample {int(lens.argmin())} of the batch has {int(lens.min())} tokens; "
                    f"expected at least {least}"
                )

    @property
    def num_response_tokens(self) -> int:
        """N."""
        return len(self._token_owners)

    @property
    def num_chunks(self) -> int:
        """Chunks of each sample, and what its padded length divides by: 2 cp_size, or 1 when nothing is split."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @cached_property
    def padded_lens(self) -> Ints:
        """Tokens of each sample with its padding, int64 [S]: a multiple of 2 cp_size (cp_size 1: no padding)."""
        return self._chunk_lens * self.num_chunks

    @property
    def rank_lens(self) -> Ints:
        """Tokens of each sample that one rank holds, padding among them, int64 [S]: the same on every rank."""
        return self.padded_lens // self.cp_size

    def owners(self, rows: Ints, positions: Ints) -> Ints:
        """Rank that holds position `positions` [k] of sample `rows` [k], int64 [k]."""
        chunk = positions // self._chunk_lens[rows]
        owners: Ints = np.minimum(chunk, self.num_chunks - 1 - chunk)
        return owners

    def places(self, rows: Ints, positions: Ints) -> Ints:
        """Where in its owner's pack position `positions` [k] of sample `rows` [k] stands, int64 [k]."""
        size = self._chunk_lens[rows]
        chunk = positions // size
        second = (chunk >= self.cp_size).astype(np.int64)
        return self._first_places[rows] + second * size + positions - chunk * size

    def token_index(self, rank: int) -> Ints:
        """Positions of the padded pack of all samples [sum of padded_lens] that the rank holds, in the order of its pack, int64."""
        self._check(rank)
        rows = np.repeat(np.arange(len(self.padded_lens)), self.padded_lens)
        first = np.cumsum(self.padded_lens) - self.padded_lens
        # chunk r comes before chunk 2 cp - 1 - r in the pack as in the sample
        return np.flatnonzero(self.owners(rows, np.arange(len(rows)) - first[rows]) == rank)

    def response_index(self, rank: int) -> Ints:
        """Flat positions in [N] of the response tokens that the rank owns, in sample and then token order, int64 [n_r]."""
        self._check(rank)
        return np.flatnonzero(self._token_owners == rank)

    def local_positions(self, rank: int) -> Ints:
        """Places in the rank's pack where the tokens of response_index(rank) are predicted, int64 [n_r]."""
        own = self.response_index(rank)
        return self.places(self._token_rows[own], self._token_positions[own])

    def local_lens(self, rank: int) -> Ints:
        """How many response tokens of each sample the rank owns, int64 [S]."""
        return np.bincount(self._token_rows[self.response_index(rank)], minlength=len(self.response_lens))

    def last_positions(self, rank: int) -> LastPositions:
        """The samples whose last position, after all tokens, the rank owns: there the value that bootstraps is read."""
        self._check(rank)
        rows = np.arange(len(self.prompt_lens))
        last = self.prompt_lens + self.response_lens - 1
        own = np.flatnonzero(self.owners(rows, last) == rank)
        return LastPositions(own, self.places(own, last[own]))

    @cached_property
    def _chunk_lens(self) -> Ints:
        return -(-(self.prompt_lens + self.response_lens) // self.num_chunks)

    @cached_property
    def _first_places(self) -> Ints:
        """Where each sample begins in a rank's pack: the same on every rank."""
        return np.cumsum(self.rank_lens) - self.rank_lens

    @cached_property
    def _token_rows(self) -> Ints:
        return np.repeat(np.arange(len(self.response_lens)), self.response_lens)

    @cached_property
    def _token_positions(self) -> Ints:
        """Sequence position at which each response token is predicted, [N]."""
        first = np.cumsum(self.response_lens) - self.response_lens
        return np.arange(len(self._token_rows)) + (self.prompt_lens - 1 - first)[self._token_rows]

    @cached_property
    def _token_owners(self) -> Ints:
        return self.owners(self._token_rows, self._token_positions)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.cp_size:
            raise ParallelError(f"there is no context-parallel rank {rank}; expected one of 0 to {self.cp_size - 1}")
