"""Section `rollout`: how responses are generated."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option

_SUPPORT_OF_ONE = (
    "At 0 the support is one token, whose log-prob is 0 whatever the weights are: the policy gradient would be exactly 0"
)


@dataclass(frozen=True)
class RolloutConfig:
    """The engine and its sampler."""

    engine: Literal["embedded"] = option("embedded", flag="--rollout-engine", help="what generates the responses")
    rollout_batch_size: int = option(128, help="prompts per rollout", unit="prompts", at_least=1)
    n_samples_per_prompt: int = option(1, help="responses sampled for each prompt", unit="samples per prompt", at_least=1)
    rollout_max_response_len: int = option(16, help="a response is cut after this many tokens", unit="tokens", at_least=1)
    rollout_temperature: float = option(
        1.0, help="logits are divided by this, in the engine and in every log-prob of the trainer", above=0, why=_SUPPORT_OF_ONE
    )
    rollout_top_p: float = option(
        1.0, help="nucleus sampling; 1 = off. The trainer uses the recorded support", above=0, at_most=1, why=_SUPPORT_OF_ONE
    )
    rollout_top_k: int = option(
        0, help="sample among the k likeliest tokens; 0 or -1 = off. The trainer uses the recorded support", at_least=-1
    )
    rollout_min_p: float = option(
        0.0,
        help="sample among tokens with at least this share of the likeliest one's probability; 0 = off. The trainer uses the "
        "recorded support",
        at_least=0,
        below=1,
        why="At 1 the support is the likeliest token alone, whose log-prob is 0 whatever the weights are",
    )
    max_logprob_gap: float = option(
        0.0,
        help="stop the run when |engine - trainer| log-prob of a token, before any update, passes this, and write the worst "
        "tokens to logs/logprob_gap.jsonl; 0 = off",
        unit="nats",
        at_least=0,
    )
    weight_bucket_bytes: int = option(
        64 * 1024 * 1024,
        help="weights reach the engine in buckets of this size; at most half of a local object store",
        unit="bytes",
        at_least=1,
    )

    @property
    def samples_per_rollout(self) -> int:
        """Prompts times responses per prompt."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def sampler_top_k(self) -> int:
        """top-k with off as 0."""
        return max(self.rollout_top_k, 0)

    @property
    def restricted(self) -> bool:
        """True when the sampler draws from fewer tokens than the vocabulary, so that its support must be recorded."""
        return bool(self.restrictions)

    @property
    def restrictions(self) -> tuple[str, ...]:
        """The options that restrict the sampler."""
        on = {
            "rollout_top_p": self.rollout_top_p < 1,
            "rollout_top_k": self.sampler_top_k > 0,
            "rollout_min_p": self.rollout_min_p > 0,
        }
        return tuple(name for name, restricts in on.items() if restricts)
