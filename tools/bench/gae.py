"""Section 3: generalised advantage estimation on ragged samples."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ppo.ppo_utils.gae import generalized_advantages
from tools.bench.measure import Candidate, Case, Limit, Scale, error_within, time_within

GAMMA, LAMBD = 1.0, 0.95
CHUNK = 128  # of the padded scan
# samples, longest, share of tokens that are masked
SHAPES: dict[Scale, list[tuple[int, int, float]]] = {
    "small": [(4, 300, 0.0), (4, 300, 0.2)],
    "full": [(64, 8192, 0.0), (64, 32768, 0.0), (64, 8192, 0.2)],
}
Sides = tuple[Tensor, Tensor]


def ragged(num_samples: int, longest: int, masked: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards, values, mask [N], lens [S]: uniform from a sixteenth of the longest up."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(longest // 16, longest + 1, (num_samples,), generator=generator)
    lens[0] = longest
    rewards, values = torch.randn((2, int(lens.sum())), generator=generator)
    return rewards, values, torch.rand(len(rewards), generator=generator) >= masked, lens


def loop_over_time(rewards: Tensor, values: Tensor, mask: Tensor, lens: Tensor) -> Sides:
    """Padded to [S, longest]; one step for each time step, from the last back. Assumes that nothing is masked."""
    r, v = (_padded(x, lens) for x in (rewards, values))
    advantages = torch.zeros_like(r)
    after, next_value = r.new_zeros(len(r)), r.new_zeros(len(r))
    for t in reversed(range(r.shape[1])):
        after = r[:, t] + GAMMA * next_value - v[:, t] + GAMMA * LAMBD * after
        advantages[:, t], next_value = after, v[:, t]
    return _flat(advantages, lens), _flat(advantages + v, lens)


def masked_loop_over_time(rewards: Tensor, values: Tensor, mask: Tensor, lens: Tensor) -> Sides:
    """The same, stepping over masked tokens."""
    r, v, m = (_padded(x, lens) for x in (rewards, values, mask))
    advantages = torch.zeros_like(r)
    after, next_value = r.new_zeros(len(r)), r.new_zeros(len(r))
    for t in reversed(range(r.shape[1])):
        here = r[:, t] + GAMMA * next_value - v[:, t] + GAMMA * LAMBD * after
        after, next_value = torch.where(m[:, t], here, after), torch.where(m[:, t], v[:, t], next_value)
        advantages[:, t] = torch.where(m[:, t], here, 0.0)
    return _flat(advantages, lens), _flat(torch.where(m, advantages + v, 0.0), lens)


def padded_power_scan(rewards: Tensor, values: Tensor, mask: Tensor, lens: Tensor) -> Sides:
    """Padded and reversed; powers of gamma lambda inside chunks by one matmul, one step for each chunk. Knows no mask."""
    r, v = (_padded(x, lens) for x in (rewards, values))
    delta = r + GAMMA * pad(v[:, 1:], (0, 1)) - v
    x = pad(delta.flip(1), (0, -delta.shape[1] % CHUNK)).view(len(v), -1, CHUNK)
    steps = torch.arange(CHUNK)
    local = x @ ((GAMMA * LAMBD) ** (steps - steps[:, None]).clamp(min=0)).triu()
    decay, carried, out = (GAMMA * LAMBD) ** (steps + 1), x.new_zeros(len(v), 1), torch.empty_like(x)
    for k in range(x.shape[1]):
        out[:, k] = local[:, k] + carried * decay
        carried = out[:, k, -1:]
    advantages = out.view(len(v), -1)[:, : v.shape[1]].flip(1)
    return _flat(advantages, lens), _flat(advantages + v, lens)


def ours(rewards: Tensor, values: Tensor, mask: Tensor, lens: Tensor) -> Sides:
    found = generalized_advantages(rewards, values, mask, lens, gamma=GAMMA, lambd=LAMBD, lambd_critic=LAMBD)
    return found.advantages, found.returns


def _padded(x: Tensor, lens: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(x, lens.tolist())), batch_first=True)


def _flat(x: Tensor, lens: Tensor) -> Tensor:
    return torch.cat([row[:size] for row, size in zip(x, lens.tolist(), strict=True)])


def cases(scale: Scale) -> Iterator[Case]:
    for num_samples, longest, masked in SHAPES[scale]:
        yield _case(num_samples, longest, masked)


def _case(num_samples: int, longest: int, masked: float) -> Case:
    rewards, values, mask, lens = data = ragged(num_samples, longest, masked)
    exact, _ = masked_loop_over_time(rewards.double(), values.double(), mask, lens)
    both = torch.stack([rewards, values])
    copied = torch.empty_like(both)
    loop = masked_loop_over_time if masked else loop_over_time
    reach = (time_within(0.03, "loop"), error_within(4e-6))
    return Case(
        title=f"3 GAE, {num_samples} x {longest} ragged, {len(mask)} tokens, {masked:.0%} masked; peak in multiples of the inputs",
        candidates=(
            Candidate("loop", lambda: loop(*data), slow=True),
            Candidate("scan", lambda: padded_power_scan(*data)),
            Candidate(
                "generalized_advantages",
                lambda: ours(*data),
                reach=reach if masked else (*reach, time_within(0.75, "scan")),
            ),
        ),
        bases=("loop", "scan"),
        error_is="advantages to float64",
        error=lambda found: float((found[0].double() - exact).abs().max()),
        limit=Limit("copy of rewards and values", lambda: copied.copy_(both)),
        input_bytes=both.untyped_storage().nbytes(),
    )
