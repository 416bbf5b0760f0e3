"""What the tests of fused norms run on each rank: layers whose parameters are named and built up as those of transformer-engine."""

from typing import Any
from unittest.mock import patch

import torch

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from slime_ppo.backends.megatron.layer_modules import LOCAL, LayerModules, RMSNorm  # noqa: E402
from slime_ppo.types.rollout_batch import RolloutBatch  # noqa: E402
from slime_ppo.types.step_plan import StepPlan  # noqa: E402
from tests.dist.backends import ranks  # noqa: E402
from tests.dist.backends.cases import Case  # noqa: E402


class NormedColumnLinear(ColumnParallelLinear):
    """A norm and the column-parallel linear after it as one module."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **rest: Any) -> None:
        super().__init__(input_size, output_size, config=config, **rest)
        self.norm_eps = config.layernorm_epsilon
        self.layer_norm_weight = RMSNorm(config, input_size).weight

    def forward(self, input_: torch.Tensor, *rest: Any) -> Any:
        wide = input_.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
        return super().forward(self.layer_norm_weight * normed.to(input_.dtype), *rest)


FUSED = LayerModules(
    norm=LOCAL.norm,
    input_norm=IdentityOp,
    input_linear=NormedColumnLinear,
    output_linear=LOCAL.output_linear,
    attention=LOCAL.attention,
)


def iteration(case: Case, batch: RolloutBatch, plan: StepPlan) -> tuple[ranks.Report, int]:
    """(`ranks.iteration` on layers with fused norms, the number of models that were made of them)."""
    with patch("slime_ppo.backends.megatron.spec.layer_modules", return_value=FUSED) as chosen:
        return ranks.iteration(case, batch, plan), chosen.call_count
