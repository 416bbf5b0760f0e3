"""Section `rollout`: how responses are generated."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option

_SUPPORT_OF_ONE = (
    "At 0 the support is one token, whose log-prob is 0 whatever the weights are: the policy gradient would be exactly 0"
)


SGLANG_MAX_TOP_K = 4096
"""SGLang's --sampling-mask-max-tokens: most tokens in a support that it returns."""


@dataclass(frozen=True)
class RolloutConfig:
    """The engine and its sampler."""

    engine: Literal["embedded", "sglang"] = option(
        "embedded",
        flag="--rollout-engine",
        help="what generates the responses: embedded = transformers in one process, for small models; sglang = SGLang's servers",
    )
    rollout_num_gpus: int | None = option(
        None,
        help="devices (CPU slots without GPUs) of all SGLang engines",
        unit="devices",
        default_text="all shared ones with --colocate, else one engine",
        at_least=1,
    )
    rollout_num_gpus_per_engine: int = option(
        1, help="devices of each SGLang engine, its tensor-parallel size", unit="devices per engine", at_least=1
    )
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
    weight_sync: Literal["auto", "tensor", "distributed", "disk"] = option(
        "auto",
        help="how weights reach the engine: tensor = through memory (CUDA IPC on shared GPUs); distributed = a process group of "
        "the actor's first rank and the servers; disk = a folder that both see. auto = tensor for the embedded engine and on "
        "shared GPUs, else distributed",
    )
    weight_sync_timeout_s: float = option(
        300.0, help="a server that takes longer for one bucket of weights counts as hung", unit="seconds", above=0
    )
    weight_sync_folder: str | None = option(
        None, help="where --weight-sync disk writes, in a folder of the run's own", default_text="<save>/weight_sync"
    )
    check_weight_update_equal: Literal["first", "always", "never"] = option(
        "first", help="which pushes are checked: the engine's checksums against the trainer's weights"
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
        """top-k with off as 0. SGLang returns supports only with a finite one: it is the most that it allows then."""
        given = max(self.rollout_top_k, 0)
        return SGLANG_MAX_TOP_K if self.sets_top_k else given

    @property
    def sets_top_k(self) -> bool:
        """True when the engine demands a top-k that was not given."""
        return self.engine == "sglang" and self.restricted and self.rollout_top_k <= 0

    @property
    def restricted(self) -> bool:
        """True when the sampler draws from fewer tokens than the vocabulary, so that its support must be recorded."""
        return bool(self.restrictions)

    @property
    def restrictions(self) -> tuple[str, ...]:
        """The options that restrict the sampler."""
        on = {
            "rollout_top_p": self.rollout_top_p < 1,
            "rollout_top_k": self.rollout_top_k > 0,
            "rollout_min_p": self.rollout_min_p > 0,
        }
        return tuple(name for name, restricts in on.items() if restricts)
