"""Random packed batches, random samples, and tiny models."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slime_ppo.ppo_utils.reference_types import ReferenceSample

VOCAB = 11


@dataclass(frozen=True)
class Packed:
    """Rewards, values, mask [N] and lens [S] of random samples; masked entries are NaN."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    lens: Tensor


def random_packed(seed: int, *, lens: Sequence[int], masked: float = 0.3, dtype: torch.dtype = torch.float64) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lens)
    mask = torch.rand(num_tokens, generator=generator) >= masked
    rewards, values = (torch.randn(num_tokens, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return Packed(rewards.where(mask, torch.nan), values.where(mask, torch.nan), mask, torch.tensor(lens, dtype=torch.int64))


class TinyModel(nn.Module):
    """Causal: the state at a position is a function of the mean embedding up to it. num_out = VOCAB + padding, or 1 (values)."""

    def __init__(self, num_out: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (VOCAB, 6), "hidden": (6, 8), "out": (8, num_out)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.head(self.states(token_ids))

    def states(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(1, len(token_ids) + 1, dtype=self.hidden.dtype)[:, None]
        return torch.tanh((self.embedding[token_ids].cumsum(0) / positions) @ self.hidden)

    def head(self, states: Tensor) -> Tensor:
        out = states @ self.out
        return out[:, 0] if out.shape[1] == 1 else out

    def keep_columns(self, rank: int, world: int) -> None:
        """Of the output layer hold only the columns of `rank`, the whole width cut into `world` equal parts."""
        self.out = nn.Parameter(self.out.detach().chunk(world, dim=1)[rank].clone())


# (prompt, response) tokens of random_samples
SHAPES = ((3, 5), (1, 1), (2, 7), (4, 3), (2, 6), (3, 4), (1, 2))
_GROUPS = (0, 0, 1, 1, 0, 2, 0, 2, 1)


def random_samples(seed: int, *, restricted: bool, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[ReferenceSample]:
    """Seven samples of six trajectories in three groups: inner masks, one without a trainable token, one cut, process rewards.

    Up to two more `shapes` are trajectories of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt_len, response_len) in enumerate(shapes):
        ids = torch.randint(0, VOCAB, (prompt_len + response_len,), generator=generator)
        mask = torch.rand(response_len, generator=generator) > 0.3
        mask[0] = True
        if index == 3:
            mask[:] = False
        supports = [torch.randperm(VOCAB, generator=generator)[:4] for _ in range(response_len)]
        process_rewards = torch.randn(response_len, generator=generator).tolist() if index == 4 else None
        rollout_log_probs = -4.5 + torch.randn(response_len, generator=generator, dtype=torch.float64)
        samples.append(
            ReferenceSample(
                prompt_ids=ids[:prompt_len],
                response_ids=ids[prompt_len:],
                loss_mask=mask,
                reward=float(torch.randn((), generator=generator)) if index != 6 else samples[0].reward,
                trajectory_id=0 if index == 6 else index,
                support=[None if i == 1 else ids for i, ids in enumerate(supports)] if restricted else None,
                process_rewards=process_rewards,
                bootstraps=index == 2,
                group_id=_GROUPS[index],
                rollout_log_probs=rollout_log_probs.where(mask, torch.nan).tolist(),
            )
        )
    return samples
