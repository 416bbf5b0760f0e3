"""Section `batch`: how a rollout is cut into optimizer steps and micro-batches."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class BatchConfig:
    """global_batch_size changes the optimization; the others are memory knobs that never change the gradient."""

    global_batch_size: int = option(
        128, help="samples per optimizer step, over all data-parallel ranks", unit="samples", at_least=1
    )
    micro_batch_size: int = option(
        8, help="samples in one forward and backward of one rank; never changes the gradient", unit="samples", at_least=1
    )
    use_dynamic_batch_size: bool = option(False, help="fill micro-batches up to --max-tokens-per-gpu instead of counting samples")
    max_tokens_per_gpu: int | None = option(
        None,
        help="tokens in one micro-batch of one rank with --use-dynamic-batch-size; a longer sample goes alone",
        unit="tokens",
        default_text="unset",
        at_least=1,
    )
    balance_by: Literal["tokens", "flops"] = option(
        "tokens",
        help="what micro-batches and data-parallel ranks get equally much of: tokens, or operations, of which attention takes more "
        "the longer a sample is; never changes the gradient",
    )
    partial_step: Literal["spread", "drop"] = option(
        "spread", help="when dropped samples leave a rollout uneven: steps of nearly equal size, or full steps only"
    )
