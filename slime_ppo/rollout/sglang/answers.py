"""One request of a sample as SGLang takes it, and its answer as a result, checked.

The server ignores body fields that it does not know, counts "length" after fewer tokens than were asked, reports log-probs of two
distributions and names versions by strings: each of these would train silently on something else, so each is checked here.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from slime_ppo.errors import RolloutError
from slime_ppo.types.sample import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    Support,
    VersionSpan,
    one_version,
)

MAX_SUPPORT_TOKENS = 4096
"""SGLang's --sampling-mask-max-tokens: it refuses to return the support of a sampler without a top_k of at most this."""

_SEEDS = 2**63
_DROPPED_FIELDS = (
    "a router between us and the server may drop the fields that it doesn't know: sglang-router 0.3.2 does, smg passes them "
    "(--sglang-router-url)"
)


class UnknownVersionError(RolloutError):
    """A server generated with weights that were never pushed to it: it was started anew, or another program pushes to it."""


def check_servable(requests: Sequence[GenerateRequest], *, vocab_size: int, deterministic: bool) -> None:
    """Refuse samplers that a server would refuse one by one, or die of. Raises RolloutError naming the sample and the flag."""
    for request in requests:
        sampling = request.sampling
        if sampling.greedy:
            continue
        if deterministic and sampling.min_p > 0:
            raise RolloutError(
                f"sample {request.sample_id}: min_p {sampling.min_p} with --sglang-deterministic: SGLang's seeded sampler has no "
                "min_p (the server would die of it); set min_p to 0 or drop --sglang-deterministic"
            )
        if sampling.restricted and _support_limit(sampling, vocab_size) > MAX_SUPPORT_TOKENS:
            raise RolloutError(
                f"sample {request.sample_id}: top_k {sampling.top_k} on a vocabulary of {vocab_size}: SGLang returns supports of "
                f"at most {MAX_SUPPORT_TOKENS} tokens; set top_k (--rollout-top-k) to 1 to {MAX_SUPPORT_TOKENS}"
            )


def request_body(request: GenerateRequest, rid: str, *, vocab_size: int, deterministic: bool) -> dict[str, Any]:
    """The JSON body for /generate; `rid` is the server's name for this attempt."""
    sampling = request.sampling
    parameters: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    else:
        # The model's own end tokens stop a request too, and SGLang has one switch for both.
        parameters["ignore_eos"] = True
    if deterministic:
        parameters["sampling_seed"] = request.seed % _SEEDS
    body: dict[str, Any] = {"rid": rid, "input_ids": request.prompt_ids.tolist(), "sampling_params": parameters}
    body["return_logprob"] = True
    if not _has_support(sampling):
        return body
    parameters |= {"top_p": sampling.top_p, "top_k": _support_limit(sampling, vocab_size), "min_p": sampling.min_p}
    return body | {"return_sampling_mask": True}


def read_answer(request: GenerateRequest, answer: Mapping[str, Any], *, versions: Collection[int]) -> GenerateResult:
    """The result of a sample. `versions` are those that were pushed to the server. Raises RolloutError naming the sample."""
    where = f"sample {request.sample_id}: the SGLang server"
    ids = np.array(_field(answer, "output_ids", where), np.int32)
    meta: Mapping[str, Any] = _field(answer, "meta_info", where)
    finish = _finish(request, _field(meta, "finish_reason", where), ids, where)
    if finish is FinishReason.ABORT and (len(ids) == 0 or not _is_whole(request.sampling, meta, len(ids))):
        # Of a request that waited when it was aborted, the server knows no more.
        return aborted_result(request, max(versions))
    if _has_support(request.sampling):
        log_probs, support = _restricted(meta, ids, where)
        # with top_k 1 the server takes the likeliest token, and its log-probs are those at temperature 1
        full = None if request.sampling.top_k == 1 else _unrestricted(meta, ids, where)
    else:
        log_probs, support, full = _unrestricted(meta, ids, where), None, None
    return GenerateResult(
        sample_id=request.sample_id,
        response_ids=ids,
        log_probs=log_probs,
        support=support,
        finish=finish,
        weight_versions=_spans(_field(meta, "weight_versions", where), versions, where),
        num_cached_tokens=int(_field(meta, "cached_tokens", where)),
        full_log_probs=full,
    )


def aborted_result(request: GenerateRequest, version: int) -> GenerateResult:
    """The result of a sample that got no token; `version` is the one that would have been used."""
    has_support = _has_support(request.sampling)
    return GenerateResult(
        sample_id=request.sample_id,
        response_ids=np.zeros(0, np.int32),
        log_probs=np.zeros(0, np.float32),
        support=Support(np.zeros(0, np.int32), np.zeros(0, np.int32)) if has_support else None,
        finish=FinishReason.ABORT,
        weight_versions=one_version(version, 0),
    )


def _has_support(sampling: SamplingParams) -> bool:
    """A greedy sampler needs none (log-probs at temperature 1)."""
    return sampling.restricted and not sampling.greedy


def _support_limit(sampling: SamplingParams, vocab_size: int) -> int:
    """The top_k to ask for; the whole vocabulary is no restriction."""
    return min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size


def _field(content: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in content or content[name] is None:
        raise RolloutError(f"{where} answered without {name}, found {sorted(content)}; {_DROPPED_FIELDS}")
    return content[name]


def _is_whole(sampling: SamplingParams, meta: Mapping[str, Any], num_tokens: int) -> bool:
    """All that belongs to the tokens of an aborted request is there."""
    per_token = ["output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs"]
    names = per_token if _has_support(sampling) else ["output_token_logprobs"]
    complete = all(name in meta and len(meta[name]) == num_tokens for name in names)
    return complete and "weight_versions" in meta and "cached_tokens" in meta


def _finish(request: GenerateRequest, reason: Mapping[str, Any], ids: np.ndarray, where: str) -> FinishReason:
    kind, asked, stops = reason["type"], request.sampling.max_new_tokens, request.sampling.stop_token_ids
    if kind == "abort":
        return FinishReason.ABORT
    if kind == "length":
        if len(ids) != asked:
            raise RolloutError(
                f"{where} ended after {len(ids)} of {asked} tokens without a stop token; its --context-length is too short for "
                f"{len(request.prompt_ids)} prompt tokens and the response"
            )
        # A stop token as the very last one is a stop.
        return FinishReason.STOP if int(ids[-1]) in stops else FinishReason.LENGTH
    matched = reason["matched"] if kind == "stop" else None
    if matched not in stops or len(ids) == 0 or int(ids[-1]) != matched:
        raise RolloutError(
            f"{where} finished with {dict(reason)} and last token {ids[-1:].tolist()}, expected one of the stop tokens "
            f"{list(stops)} as the last one; the model folder's own end tokens must be among the stop tokens"
        )
    return FinishReason.STOP


def _unrestricted(meta: Mapping[str, Any], ids: np.ndarray, where: str) -> np.ndarray:
    """float32 [R] of the full softmax; each entry is (log-prob, token id, text)."""
    entries = _field(meta, "output_token_logprobs", where)
    if [entry[1] for entry in entries] != ids.tolist():
        raise RolloutError(f"{where} answered log-probs of {len(entries)} other tokens than its {len(ids)} output_ids")
    return np.array([entry[0] for entry in entries], np.float32)


def _restricted(meta: Mapping[str, Any], ids: np.ndarray, where: str) -> tuple[np.ndarray, Support]:
    """float32 [R] of the softmax over the support, and the support."""
    rows: Sequence[Sequence[int]] = _field(meta, "output_token_sampling_mask", where)
    log_probs = _field(meta, "output_token_sampling_logprobs", where)
    if not len(rows) == len(log_probs) == len(ids):
        raise RolloutError(f"{where} answered {len(rows)} supports and {len(log_probs)} log-probs for {len(ids)} output_ids")
    counts = np.array([len(row) for row in rows], np.int32)
    flat = np.fromiter((token for row in rows for token in row), np.int32, int(counts.sum()))
    return np.array(log_probs, np.float32), Support(flat, counts)


def _spans(spans: Sequence[Mapping[str, Any]], versions: Collection[int], where: str) -> tuple[VersionSpan, ...]:
    known = {str(version) for version in tuple(versions)}  # a push may add one meanwhile
    unknown = [span["version"] for span in spans if span["version"] not in known]
    if unknown:
        raise UnknownVersionError(
            f"{where} generated with weights of version {unknown[0]!r}, which were never pushed to it; pushed were "
            f"{sorted(versions)}: it was started anew, or another program pushes to it"
        )
    return tuple(VersionSpan(int(span["version"]), span["start"], span["end"]) for span in spans)
