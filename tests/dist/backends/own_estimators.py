"""Advantage estimators as a user may write them, which fail in the sample at row 5 of the rollout."""

import torch

from slime_ppo.ppo_utils.advantages import AdvantageInputs, Advantages, AdvantageSettings
from slime_ppo.ppo_utils.registries import EstimatorSpec

_HERE = "tests.dist.backends.own_estimators"
WITH_NAN = EstimatorSpec(f"{_HERE}.with_nan", needs_critic=False, whitens=True, uses_token_rewards=True, uses_groups=False)
RAISES = EstimatorSpec(f"{_HERE}.raises", needs_critic=False, whitens=True, uses_token_rewards=True, uses_groups=False)

MISSING = EstimatorSpec(f"{_HERE}.not_there", needs_critic=False, whitens=True, uses_token_rewards=True, uses_groups=False)


def with_nan(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    ones = torch.ones_like(inputs.token_rewards)
    bad = inputs.rows.repeat_interleave(inputs.lens) == 5
    return Advantages(advantages=ones.where(~bad, torch.nan), returns=ones)


def raises(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    if 5 in inputs.rows.tolist():
        raise KeyError("row 5 has no table")
    return Advantages(advantages=inputs.token_rewards, returns=inputs.token_rewards)
