"""Section `recompute`: activations that are made again in the backward pass instead of being kept."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class RecomputeConfig:
    """Memory for time, in every role; never changes the gradient."""

    recompute_granularity: Literal["full", "selective"] | None = option(
        None,
        help="full: whole layers, which needs --recompute-method and --recompute-num-layers; selective: --recompute-modules",
        default_text="everything is kept",
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        help="of full: uniform keeps the input of every --recompute-num-layers layers; block recomputes so many layers of each "
        "stage and keeps the others",
        default_text="unset",
    )
    recompute_num_layers: int | None = option(
        None, help="of full: see --recompute-method", unit="layers", default_text="unset", at_least=1
    )
    recompute_modules: str | None = option(
        None,
        help="of selective: parts of a layer, separated by commas: core_attn, mlp, layernorm, moe",
        default_text="core_attn",
    )

    @property
    def modules(self) -> tuple[str, ...]:
        """Parts of a layer that are recomputed with `selective`, default resolved."""
        return ("core_attn",) if self.recompute_modules is None else tuple(self.recompute_modules.split(","))
