"""What goes into a rollout engine and what comes out, one object per sample. Token ids in, token ids out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np


class FinishReason(StrEnum):
    """Why generation ended. LENGTH includes turn and context caps; ABORT never trains as STOP."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt file.

    `index` is the row in the file; `token_ids` is int32 [P], P >= 1.
    """

    index: int
    text: str
    token_ids: np.ndarray
    label: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """The sampler. temperature 0 = greedy (evaluation only); top_k 0 = off; top_p 1 = off; min_p 0 = off.

    The support is joint, as SGLang's sampler has it: rank < top_k and (cumulative - own) <= top_p and
    own >= min_p * the largest, all three on the full softmax(logits / temperature).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def restricted(self) -> bool:
        """True when the sampler draws from fewer tokens than the vocabulary, so that the support must be recorded."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True)
class Support:
    """The token ids the sampler could have drawn at each response token, the sampled one always among them.

    `ids` int32 [sum(counts)], most likely first within a token; `counts` int32 [R].
    """

    ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class GenerateRequest:
    """`prompt_ids` int32 [P]; `seed` depends on the sample alone, never on its batch (SEMANTICS 14)."""

    sample_id: int
    prompt_ids: np.ndarray
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True)
class GenerateResult:
    """One answer. `response_ids` int32 [R] (a sampled stop token is included); `log_probs` float32 [R], the behaviour
    log-probs after temperature, renormalised over the support; `support` is None when the sampler is unrestricted."""

    sample_id: int
    response_ids: np.ndarray
    log_probs: np.ndarray
    support: Support | None
    finish: FinishReason
    weight_version: int


@dataclass(frozen=True)
class Sample:
    """A prompt, a response and its reward.

    Samples of one group share a prompt; all samples of one trajectory share a reward and are never split over two
    optimizer steps. `loss_mask` bool [R] marks the trainable tokens. `reward` is None until the reward function ran, which
    may also have paid single tokens: `process_rewards` float32 [R].

    Example: prompt "The door was" (4 tokens) answered with 16 tokens:
        Sample(sample_id=7, group_id=7, trajectory_id=7, response_ids=int32[16], loss_mask=bool[16], ...)
    """

    sample_id: int
    group_id: int
    trajectory_id: int
    prompt: Prompt
    response_ids: np.ndarray
    response_text: str
    rollout_log_probs: np.ndarray
    support: Support | None
    loss_mask: np.ndarray
    finish: FinishReason
    weight_version: int
    reward: float | None = None
    process_rewards: np.ndarray | None = None

    def with_reward(self, reward: float, process_rewards: np.ndarray | None = None) -> "Sample":
        return replace(self, reward=reward, process_rewards=process_rewards)
