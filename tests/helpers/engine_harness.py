"""What the contract tests need to know about an engine beyond its protocol: how weights reach it, how it draws.

A new engine joins the contract tests with one more name in `ENGINES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from slime_ppo.rollout.embedded.engine import EmbeddedEngine
from slime_ppo.rollout.engine import RolloutEngine
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.types.sample import GenerateRequest, GenerateResult, SamplingParams
from slime_ppo.weight_sync.base import TensorTarget
from slime_ppo.weight_sync.bucket import TensorSpec, dtype_name, pack_bucket, plan_buckets

BUCKET_BYTES = 64 * 1024
BOUNDARY = 1e-5
"""Of probabilities: batch shapes change them by less."""


@dataclass(frozen=True)
class EngineHarness:
    """`push(folder, version)` brings a folder's weights; `push_partly` begins that push and ends it before the last bucket
    (raising WeightSyncError); `draw_margin(request, probs, position)` says how far the draw of response token `position` is
    from another token, as a change of log-probs, `probs` float64 [V] being the full distribution there. `frees_memory`: offload
    gives memory back. `serves_min_p` False: min_p is refused."""

    engine: RolloutEngine
    folder: Path
    push: Callable[[Path, int], int]
    push_partly: Callable[[Path, int], None]
    draw_margin: Callable[[GenerateRequest, np.ndarray, int], float]
    frees_memory: bool
    serves_min_p: bool


def embedded_harness(folder: Path) -> EngineHarness:
    engine = EmbeddedEngine(folder)
    return EngineHarness(
        engine=engine,
        folder=folder,
        push=lambda source, version: push_folder(engine, source, version),
        push_partly=lambda source, version: push_folder_partly(engine, source, version),
        draw_margin=race_margin,
        frees_memory=True,
        serves_min_p=True,
    )


def sglang_harness(folder: Path, engine: SGLangEngine) -> EngineHarness:
    """Around an engine whose server runs with deterministic inference, on a CPU."""
    return EngineHarness(
        engine=engine,
        folder=folder,
        push=lambda source, version: push_folder(engine, source, version),
        push_partly=lambda source, version: push_folder_partly(engine, source, version),
        draw_margin=hashed_margin,
        frees_memory=False,
        serves_min_p=False,
    )


ENGINES = ("embedded", "sglang")


def push_folder(engine: TensorTarget, source: Path, version: int) -> int:
    """Push the weights of a HF folder as a trainer would, in several read-only buckets."""
    tensors = folder_tensors(source)
    manifest = folder_manifest(tensors)
    engine.begin_update(manifest, version, bucket_bytes=BUCKET_BYTES)
    for bucket in plan_buckets(manifest, BUCKET_BYTES):
        flat = pack_bucket(bucket, tensors)
        flat.setflags(write=False)
        engine.load_bucket(bucket.index, flat)
    return engine.end_update()


def push_folder_partly(engine: TensorTarget, source: Path, version: int) -> None:
    tensors = folder_tensors(source)
    manifest = folder_manifest(tensors)
    engine.begin_update(manifest, version, bucket_bytes=BUCKET_BYTES)
    for bucket in plan_buckets(manifest, BUCKET_BYTES)[:-1]:
        engine.load_bucket(bucket.index, pack_bucket(bucket, tensors))
    engine.end_update()


def folder_manifest(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items())


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in load_file(folder / "model.safetensors").items()}


def race_scores(request: GenerateRequest, probs: np.ndarray, position: int) -> np.ndarray:
    """float64 [V]: log p - log E; the embedded engine draws the best. Every step takes V numbers of the seed's generator."""
    generator = torch.Generator().manual_seed(request.seed)
    noise = [torch.empty(len(probs)).exponential_(generator=generator) for _ in range(position + 1)][position]
    return np.asarray(np.log(probs) - np.log(noise.double().numpy()))


def race_margin(request: GenerateRequest, probs: np.ndarray, position: int) -> float:
    """How far the best score is ahead of the second."""
    second, best = np.sort(race_scores(request, probs, position))[-2:]
    return float(best - second)


def hashed_margin(request: GenerateRequest, probs: np.ndarray, position: int) -> float:
    """How far SGLang's best score is ahead of the second, for an unrestricted sampler: log p + Gumbel noise from a hash of seed,
    position of the token before the drawn one, and token id (`multinomial_with_seed`)."""
    before = len(request.prompt_ids) - 1 + position
    uniform = murmur_hash(request.seed, before, np.arange(len(probs))) / np.float64(2**32 - 1)
    noise = -np.log(-np.minimum(np.log(uniform), -(2.0**-32)))
    second, best = np.sort(np.log(probs) + noise)[-2:]
    return float(best - second)


def murmur_hash(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """uint32 [V]: murmur3 of the 16 bytes seed (8), position (4), id (4)."""
    blocks = [seed & 0xFFFFFFFF, seed >> 32, position, ids.astype(np.uint64)]
    mixed: np.ndarray = np.zeros(len(ids), np.uint64)
    for block in blocks:
        key = np.uint64(block) if isinstance(block, int) else block
        key = _low(_rotated(_low(key * np.uint64(0xCC9E2D51)), 15) * np.uint64(0x1B873593))
        mixed = _low(_rotated(mixed ^ key, 13) * np.uint64(5) + np.uint64(0xE6546B64))
    mixed = mixed ^ np.uint64(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = _low((mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor))
    return mixed ^ (mixed >> np.uint64(16))


def _low(words: np.ndarray) -> np.ndarray:
    return words & np.uint64(0xFFFFFFFF)


def _rotated(words: np.ndarray, bits: int) -> np.ndarray:
    return _low((words << np.uint64(bits)) | (words >> np.uint64(32 - bits)))


class ReferenceModel:
    """An independent forward pass: one unpadded sequence at a time, no cache, float64 softmax."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def log_probs(self, prompt_ids: np.ndarray, response_ids: np.ndarray, *, temperature: float) -> np.ndarray:
        """Full-vocabulary log-probs at each response token, float64 [R, V]: response token i is predicted at P + i - 1."""
        ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = self._model(ids[None]).logits[0, len(prompt_ids) - 1 : -1]
        return np.asarray((logits.double() / temperature).log_softmax(-1))


def joint_support(probs: np.ndarray, *, top_k: int, top_p: float, min_p: float = 0.0) -> list[int]:
    """Token ids by the plain rule on the full distribution, float64 [V]: rank < top_k and (cumulative - own) <= top_p and
    own >= min_p * largest."""
    kept: list[int] = []
    before = 0.0
    for rank, token in enumerate(np.argsort(-probs, kind="stable")):
        if (top_k == 0 or rank < top_k) and before <= top_p and probs[token] >= min_p * probs.max():
            kept.append(int(token))
        before += probs[token]
    return kept


def check_joint_rule(reference: ReferenceModel, requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]) -> None:
    """Supports by the reference's distribution, and log-probs renormalised over them."""
    sampling = requests[0].sampling
    for request, result in zip(requests, results, strict=True):
        assert result.support is not None
        full = reference.log_probs(request.prompt_ids, result.response_ids, temperature=sampling.temperature)
        rows = np.split(result.support.ids, np.cumsum(result.support.counts)[:-1])
        for token, log_prob, ids, log_probs in zip(result.response_ids, result.log_probs, rows, full, strict=True):
            _check_support_row(np.exp(log_probs), ids, sampling)
            expected = log_probs[token] - np.log(np.exp(log_probs[ids]).sum())
            assert log_prob == pytest.approx(expected, abs=1e-4)
        if result.full_log_probs is not None:
            chosen = full[np.arange(len(full)), result.response_ids]
            np.testing.assert_allclose(result.full_log_probs, chosen, atol=1e-4, rtol=0)


def _check_support_row(probs: np.ndarray, ids: np.ndarray, sampling: SamplingParams) -> None:
    """The engine's support lies between the reference rule with its bounds a little tighter and a little looser."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    shift = BOUNDARY / probs.max() if min_p > 0 else 0.0
    fewest = joint_support(probs, top_k=top_k, top_p=top_p - BOUNDARY, min_p=min(min_p + shift, 1.0))
    most = joint_support(probs, top_k=top_k, top_p=top_p + BOUNDARY, min_p=min_p - shift)
    assert max(1, len(fewest)) <= len(ids) <= len(most)
    np.testing.assert_allclose(probs[ids], probs[most][: len(ids)], atol=BOUNDARY, rtol=0)


def make_requests(
    num_samples: int,
    sampling: SamplingParams,
    *,
    vocab_size: int = 100,
    seed: int = 0,
    first_sample_id: int = 10,
) -> list[GenerateRequest]:
    """Random prompts of 1 to 9 tokens, different seeds, sample ids that are not positions."""
    rng = np.random.default_rng(seed)
    lens = [1 + index * 4 % 9 for index in range(num_samples)]
    return [
        GenerateRequest(first_sample_id + 3 * index, rng.integers(4, vocab_size, length).astype(np.int32), 1000 + index, sampling)
        for index, length in enumerate(lens)
    ]
