"""Generate for a batch of requests: one prefill over left-padded prompts, then one token per row and step.

Shapes: B rows, P longest prompt, N most response tokens of any row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from slime_ppo.rollout.embedded.sampler import Draw, sampler_of
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, Support, one_version

NO_TOKEN = -1
"""Fills rows of the stop-token table; equals no token id."""


@dataclass(frozen=True)
class _Inputs:
    """`prompts` int64 [B, P] and what covers prompt and response, int64 [B, P + N]: `attended` (0 on padding), `positions`."""

    prompts: torch.Tensor
    attended: torch.Tensor
    positions: torch.Tensor
    stops: torch.Tensor
    limits: torch.Tensor


@dataclass(frozen=True)
class _Ending:
    """After the last step: `lengths` int64 [B] response tokens; bool [B]: `stopped` by a stop token, `running` when aborted."""

    lengths: torch.Tensor
    stopped: torch.Tensor
    running: torch.Tensor


@torch.inference_mode()
def decode(
    model: PreTrainedModel, requests: Sequence[GenerateRequest], *, weight_version: int, aborted: Callable[[], bool]
) -> list[GenerateResult]:
    """One result per request, in order. All requests have the temperature and restrictions of the first.

    Ends early when every row is done; rows that are done go on computing, and what they draw is ignored. `aborted` is
    asked before every step; when it says yes, unfinished rows end with what they have and finish ABORT.
    """
    device = model.device
    inputs = _lay_out(requests, model.config.max_position_embeddings, device)
    seeds = [request.seed for request in requests]
    draw_next = sampler_of(requests[0].sampling, seeds, vocab_size=model.config.vocab_size, device=device)
    cache = DynamicCache(config=model.config)
    draws: list[Draw] = []
    ending = _Ending(torch.zeros_like(inputs.limits), torch.zeros_like(inputs.limits).bool(), torch.ones_like(inputs.limits).bool())
    running = [True] * len(requests)
    tokens = inputs.prompts
    seen = 0
    while any(running) and not aborted():
        begin, seen = seen, seen + tokens.shape[1]
        logits = model(
            input_ids=tokens,
            attention_mask=inputs.attended[:, :seen],
            position_ids=inputs.positions[:, begin:seen],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        draw = draw_next(logits, running)
        draws.append(draw)
        tokens = draw.tokens[:, None]
        ending = _end_rows(ending, inputs, tokens)
        running = ending.running.tolist()
    return _results(requests, draws, ending, weight_version)


def _lay_out(requests: Sequence[GenerateRequest], max_positions: int, device: torch.device) -> _Inputs:
    lens = np.array([len(request.prompt_ids) for request in requests])
    longest, most_new = int(lens.max()), max(request.sampling.max_new_tokens for request in requests)
    attended = np.arange(longest + most_new) >= (longest - lens)[:, None]
    prompts = np.zeros((len(requests), longest), np.int64)
    prompts[attended[:, :longest]] = np.concatenate([request.prompt_ids for request in requests])
    # Padding has position 0; a row that is done may compute past the model's positions, and what it computes is ignored.
    positions = (attended.cumsum(1) - 1).clip(0, max_positions - 1)
    stops = np.full((len(requests), max(1, max(len(request.sampling.stop_token_ids) for request in requests))), NO_TOKEN)
    for row, request in zip(stops, requests, strict=True):
        row[: len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
    limits = np.array([request.sampling.max_new_tokens for request in requests])
    arrays = (prompts, attended.astype(np.int64), positions, stops, limits)
    return _Inputs(*(torch.from_numpy(array).to(device) for array in arrays))


def _end_rows(before: _Ending, inputs: _Inputs, tokens: torch.Tensor) -> _Ending:
    """Count the token of every running row, and end the rows that drew a stop token or reached their limit."""
    lengths = before.lengths + before.running
    stopped = before.stopped | (before.running & (tokens == inputs.stops).any(-1))
    return _Ending(lengths, stopped, before.running & ~stopped & (lengths < inputs.limits))


def _results(
    requests: Sequence[GenerateRequest], draws: Sequence[Draw], ending: _Ending, weight_version: int
) -> list[GenerateResult]:
    lengths = ending.lengths.tolist()
    if draws:
        tokens = torch.stack([draw.tokens for draw in draws], 1).to(torch.int32).cpu().numpy()
        log_probs = torch.stack([draw.log_probs for draw in draws], 1).cpu().numpy()
    else:
        tokens, log_probs = np.zeros((len(requests), 0), np.int32), np.zeros((len(requests), 0), np.float32)
    finishes = [
        FinishReason.ABORT if running else FinishReason.STOP if stopped else FinishReason.LENGTH
        for running, stopped in zip(ending.running.tolist(), ending.stopped.tolist(), strict=True)
    ]
    supports = _supports(requests, draws, lengths)
    full = [draw.full_log_probs for draw in draws if draw.full_log_probs is not None]
    full_log_probs = torch.stack(full, 1).cpu().numpy() if full else None
    return [
        GenerateResult(
            sample_id=request.sample_id,
            response_ids=tokens[row, : lengths[row]],
            log_probs=log_probs[row, : lengths[row]],
            support=supports[row],
            finish=finishes[row],
            weight_versions=one_version(weight_version, lengths[row]),
            full_log_probs=None if full_log_probs is None else full_log_probs[row, : lengths[row]],
        )
        for row, request in enumerate(requests)
    ]


def _supports(requests: Sequence[GenerateRequest], draws: Sequence[Draw], lengths: Sequence[int]) -> list[Support | None]:
    """Turn the steps' supports of all rows into the rows' supports of all steps."""
    sampling = requests[0].sampling
    if sampling.greedy or not sampling.restricted:
        return [None] * len(requests)
    steps = [draw.kept for draw in draws if draw.kept is not None]
    ends = [step.counts.cumsum() for step in steps]
    supports: list[Support | None] = []
    for row, length in enumerate(lengths):
        counts = np.array([step.counts[row] for step in steps[:length]], np.int32)
        pieces = [step.ids[end[row] - step.counts[row] : end[row]] for step, end in zip(steps[:length], ends[:length], strict=True)]
        supports.append(Support(ids=np.concatenate([np.zeros(0, np.int32), *pieces]), counts=counts))
    return supports
