"""The rollout engine as the rest of the program sees it: token ids in, token ids out.

Every engine keeps this contract (tests/contracts/test_rollout_engine.py):
- one result per request, in the order of the requests; `len(log_probs) == len(response_ids)`; `finish` is always set;
- a sampled stop token is kept, as the last response token;
- the support comes with every result whose sampler is restricted (SEMANTICS 2);
- the random numbers of a sample depend on its seed alone, never on the batch it was in (SEMANTICS 14);
- after the weights part woke, `generate` raises RolloutError until a version was pushed; the same after a failed push;
- `offload` returns when the memory is measurably free;
- an engine that loses what it runs on while it generates gives back, with finish ABORT, what it could not finish: no sample is
  lost or doubled. It has no version then; `wake` of the weights part starts anew what has died, and the next push serves again.

No torch: the driver checks requests and results with this module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Flag
from math import isfinite
from typing import ClassVar, Protocol

import numpy as np

from slime_ppo.errors import RolloutError
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, Support

NO_VERSION = -1
"""What `weight_version` says while the engine holds no weights that a trainer pushed."""

LOG_PROB_ROUNDING = 1e-4
"""A log-prob of a token with probability 1 may come out this far above 0."""


class EnginePart(Flag):
    """What an engine holds on its device. The weights wake first, are pushed, and then the KV cache wakes."""

    WEIGHTS = 1
    KV_CACHE = 2
    ALL = WEIGHTS | KV_CACHE


@dataclass(frozen=True)
class EngineHealth:
    """`awake` parts, the version `generate` would use (NO_VERSION: none), device bytes held between two calls, servers that
    have died and were not started anew."""

    awake: EnginePart
    weight_version: int
    bytes_resident: int
    num_lost: int = 0


class RolloutEngine(Protocol):
    """The seam to anything that generates. `returns_support` False: the config refuses restricted samplers for this engine."""

    returns_support: ClassVar[bool]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order. Raises RolloutError on a request it can't serve or without valid weights."""
        ...

    def abort(self) -> None:
        """End the running `generate`: what is unfinished comes back with finish ABORT. Nothing happens when idle."""
        ...

    def wake(self, parts: EnginePart) -> None:
        """Allocate `parts` again. Weights are without a version until the next push; a part that is awake stays as it is.
        Servers that have died are started anew."""
        ...

    def offload(self, parts: EnginePart) -> None:
        """Free `parts`; returns when the memory is free. Weights are not kept anywhere: the next push brings them."""
        ...

    def weight_version(self) -> int:
        """The version of the last complete push, NO_VERSION without one."""
        ...

    def health(self) -> EngineHealth:
        """What the engine holds; raises RolloutError when it can't be reached."""
        ...


def check_requests(requests: Sequence[GenerateRequest], *, vocab_size: int, max_positions: int) -> None:
    """Refuse what no engine can serve; a RolloutError names the sample, what was found and what to change.

    `vocab_size` is the real vocabulary, `max_positions` the longest prompt plus response the model has positions for.
    """
    for request in requests:
        _check_prompt(request, vocab_size)
        _check_sampling(request, vocab_size)
        prompt_len, response_len = len(request.prompt_ids), request.sampling.max_new_tokens
        if prompt_len + response_len > max_positions:
            raise RolloutError(
                f"sample {request.sample_id}: a prompt of {prompt_len} tokens and up to {response_len} response tokens need "
                f"{prompt_len + response_len} positions, the model has {max_positions} (max_position_embeddings); shorten the "
                "prompts or lower --rollout-max-response-len"
            )


def check_results(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]) -> None:
    """Hold the results against the engine contract; a RolloutError names the sample and the rule that was broken."""
    asked, answered = [request.sample_id for request in requests], [result.sample_id for result in results]
    if len(asked) != len(answered):
        raise RolloutError(
            f"the engine returned {len(answered)} results for {len(asked)} requests; expected one per request, in order"
        )
    if asked != answered:
        at = next(index for index, (a, b) in enumerate(zip(asked, answered, strict=True)) if a != b)
        raise RolloutError(
            f"the engine returned sample {answered[at]} at position {at}, expected sample "
            f"{asked[at]}: results must be in request order"
        )
    for request, result in zip(requests, results, strict=True):
        _check_tokens(request, result)
        _check_finish(request, result)
        _check_support(request, result)


def _check_prompt(request: GenerateRequest, vocab_size: int) -> None:
    ids = request.prompt_ids
    if ids.ndim != 1 or len(ids) == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise RolloutError(
            f"sample {request.sample_id}: prompt_ids is {ids.dtype} {list(ids.shape)}, expected integers [P] with P >= 1"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside) > 0:
        raise RolloutError(
            f"sample {request.sample_id}: prompt token id {int(outside[0])} is outside the model's vocabulary of {vocab_size}; "
            "the prompts must be encoded with the tokenizer of the model folder"
        )


def _check_sampling(request: GenerateRequest, vocab_size: int) -> None:
    sampling = request.sampling
    rules: Mapping[str, bool] = {
        f"max_new_tokens is {sampling.max_new_tokens}, expected at least 1": sampling.max_new_tokens >= 1,
        f"temperature is {sampling.temperature}, expected a finite number >= 0": isfinite(sampling.temperature)
        and sampling.temperature >= 0,
        f"top_p is {sampling.top_p}, expected 0 < top_p <= 1": 0 < sampling.top_p <= 1,
        f"top_k is {sampling.top_k}, expected 0 (off) or more": sampling.top_k >= 0,
        f"min_p is {sampling.min_p}, expected 0 (off) <= min_p <= 1": 0 <= sampling.min_p <= 1,
        f"seed is {request.seed}, expected 0 or more": request.seed >= 0,
        f"stop_token_ids {sampling.stop_token_ids} are not all inside the model's vocabulary of {vocab_size}": all(
            0 <= stop < vocab_size for stop in sampling.stop_token_ids
        ),
    }
    for message, holds in rules.items():
        if not holds:
            raise RolloutError(f"sample {request.sample_id}: {message}")


def _check_tokens(request: GenerateRequest, result: GenerateResult) -> None:
    ids, log_probs, most = result.response_ids, result.log_probs, request.sampling.max_new_tokens
    where = f"sample {request.sample_id}: the engine returned"
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RolloutError(f"{where} response_ids {ids.dtype} {list(ids.shape)}, expected integers [R]")
    if log_probs.shape != ids.shape:
        raise RolloutError(
            f"{where} {list(log_probs.shape)} log-probs for {list(ids.shape)} response tokens, expected one per token"
        )
    if len(ids) > most:
        raise RolloutError(f"{where} {len(ids)} tokens, asked for at most {most}")
    if len(ids) == 0 and result.finish is not FinishReason.ABORT:
        raise RolloutError(f"{where} no token with finish {result.finish}; only an aborted sample may be empty")
    bad = np.flatnonzero(~(np.isfinite(log_probs) & (log_probs <= LOG_PROB_ROUNDING)))
    if len(bad) > 0:
        raise RolloutError(f"{where} log-prob {log_probs[bad[0]]} at response token {bad[0]}, expected a finite number <= 0")
    _check_full_log_probs(where, result)
    _check_versions(where, result)


def _check_full_log_probs(where: str, result: GenerateResult) -> None:
    """A support holds part of the probability, so that a token has no less there than in the full vocabulary."""
    full = result.full_log_probs
    if full is None:
        return
    if result.support is None:
        raise RolloutError(f"{where} log-probs over the full vocabulary twice: the sampler is not restricted")
    if full.shape != result.log_probs.shape:
        raise RolloutError(
            f"{where} {list(full.shape)} log-probs over the full vocabulary, expected {list(result.log_probs.shape)}"
        )
    bad = np.flatnonzero(~(np.isfinite(full) & (full <= result.log_probs + LOG_PROB_ROUNDING)))
    if len(bad) > 0:
        raise RolloutError(
            f"{where} log-prob {full[bad[0]]} over the full vocabulary and {result.log_probs[bad[0]]} over the support at response "
            f"token {bad[0]}, expected a finite number that is not above the second"
        )


def _check_versions(where: str, result: GenerateResult) -> None:
    """The spans cover the response in order, and each is of a version that was pushed."""
    spans, num_tokens = result.weight_versions, len(result.response_ids)
    ends = [0, *(span.end for span in spans)]
    joined = all(span.start == end <= span.end for span, end in zip(spans, ends[:-1], strict=True))
    if not spans or not joined or ends[-1] != num_tokens:
        found = [(span.version, span.start, span.end) for span in spans]
        raise RolloutError(
            f"{where} weight versions (version, start, end) {found} for {num_tokens} response tokens, expected spans without gaps"
        )
    unknown = [span.version for span in spans if span.version < 0]
    if unknown:
        raise RolloutError(f"{where} weight version {unknown[0]}, expected the version of a push (0 or more)")


def _check_finish(request: GenerateRequest, result: GenerateResult) -> None:
    where = f"sample {request.sample_id}: the engine returned"
    if not isinstance(result.finish, FinishReason):
        raise RolloutError(f"{where} finish {result.finish!r}, expected one of {[reason.value for reason in FinishReason]}")
    stops = np.flatnonzero(np.isin(result.response_ids, request.sampling.stop_token_ids))
    last = len(result.response_ids) - 1
    if len(stops) > 0 and stops[0] != last:
        raise RolloutError(
            f"{where} tokens after the stop token {result.response_ids[stops[0]]} at response token {stops[0]} of {last + 1}"
        )
    if (len(stops) > 0) != (result.finish is FinishReason.STOP):
        raise RolloutError(
            f"{where} finish {result.finish.value} with last token {result.response_ids[-1:].tolist()}; a sampled stop token "
            f"({list(request.sampling.stop_token_ids)}) must be kept as the last response token, and only it means stop"
        )


def _check_support(request: GenerateRequest, result: GenerateResult) -> None:
    sampling, support = request.sampling, result.support
    expected = sampling.restricted and not sampling.greedy
    if support is None:
        if expected:
            raise RolloutError(
                f"sample {request.sample_id}: the engine returned no support although the sampler is restricted "
                f"(top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}); the exact ratio needs it: use an "
                "engine that returns it"
            )
        return
    if not expected:
        raise RolloutError(f"sample {request.sample_id}: the engine returned a support although the sampler is not restricted")
    _check_support_rows(request, result, support)


def _check_support_rows(request: GenerateRequest, result: GenerateResult, support: Support) -> None:
    where = f"sample {request.sample_id}: the engine returned"
    counts, num_tokens = support.counts, len(result.response_ids)
    if counts.shape != (num_tokens,) or support.ids.ndim != 1 or int(counts.sum()) != len(support.ids):
        raise RolloutError(
            f"{where} support counts {list(counts.shape)} that add up to {int(counts.sum())} for {num_tokens} response tokens "
            f"and {len(support.ids)} support ids; expected one count per token and their sum ids"
        )
    if num_tokens == 0:
        return
    top_k = request.sampling.top_k
    if counts.min() < 1 or (top_k > 0 and counts.max() > top_k):
        raise RolloutError(
            f"{where} supports of {counts.min()} to {counts.max()} tokens, expected 1 to {top_k or 'the vocabulary'}"
        )
    rows = np.repeat(np.arange(num_tokens), counts)
    drawn = np.bincount(rows, weights=support.ids == result.response_ids[rows], minlength=num_tokens)
    if (drawn != 1).any():
        at = int(np.flatnonzero(drawn != 1)[0])
        raise RolloutError(
            f"{where} token {result.response_ids[at]} at response token {at}, which is "
            f"{int(drawn[at])} times in its support, expected once"
        )
