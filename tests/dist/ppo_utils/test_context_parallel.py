"""Context parallelism on real ranks, every response length in one batch, against the unsharded functions in float64."""

import pytest
import torch
from torch import Tensor

from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.gae import generalized_advantages
from slime_ppo.ppo_utils.packed import sample_index, segment_sum
from slime_ppo.ppo_utils.token_rewards import build_token_rewards
from tests.dist.ppo_utils.cp_ranks import GAE, KL_COEF, CpCase, cp_case, data_parallel_share, every_length
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.ppo_utils.cp_ranks"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# gather, token rewards, bootstrap values, GAE, sample sums forward and backward
COLLECTIVES = [1, 0, 1, 1, 1, 1]


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Equal to float64 up to the tolerance, relative to the largest number; NaN in the same places."""
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        return False
    wanted = expected.double().nan_to_num()
    largest = max([1.0, *wanted.abs().tolist()])
    return bool(((found.double().nan_to_num() - wanted).abs() <= TOLERANCE[dtype] * largest).all())


def _unsharded(case: CpCase) -> dict[str, Tensor]:
    """What no split gives, in float64."""
    rewards = build_token_rewards(
        case.sequence_rewards.double(),
        case.old.double(),
        case.ref.double(),
        case.mask,
        case.lens,
        kl_coef=KL_COEF,
        process_rewards=case.process_rewards.double(),
    ).rewards
    found = generalized_advantages(
        rewards, case.values.double(), case.mask, case.lens, bootstrap_values=case.bootstrap_values.double(), **GAE
    )
    x = case.upstream[0].double().requires_grad_()
    sums = segment_sum(x, case.lens)
    (sums.square()[sample_index(case.lens)] * case.upstream[1].double()).sum().backward()
    assert x.grad is not None
    return {
        "rewards": rewards,
        "advantages": found.advantages,
        "returns": found.returns,
        "sums": sums.detach(),
        "gradient": x.grad,
    }


def _check(case: CpCase, results: list[dict[str, Tensor]], dtype: torch.dtype) -> None:
    expected = _unsharded(case)
    for rank, found in enumerate(results):
        own = torch.from_numpy(case.cp_map.response_index(rank))
        for name in ("rewards", "advantages", "returns", "gradient"):
            assert _close(found[name], expected[name][own], dtype), f"{name} of rank {rank}"
            assert found[name].dtype == dtype
        assert _close(found["sums"], expected["sums"], dtype), f"sums of rank {rank}"
        assert torch.allclose(found["gathered"], torch.cat([case.upstream, case.values[None]]), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found["bootstrap_values"], case.bootstrap_values)
        assert found["collectives"].tolist() == COLLECTIVES


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_context_parallel_every_length_equals_no_split(rank_pool: RankPool, cp_size: int, dtype: torch.dtype) -> None:
    sizes = every_length(cp_size)
    results = rank_pool.run(f"{RANKS}:context_parallel", world=cp_size, sizes=sizes, dtype=dtype)
    _check(cp_case(cp_size, sizes, dtype), results, dtype)


@pytest.mark.parametrize("sizes", [[(1, 1)], [(1, 2), (1, 1)], [(40, 3)]])
def test_context_parallel_rank_without_any_token_takes_part(rank_pool: RankPool, sizes: list[tuple[int, int]]) -> None:
    case = cp_case(4, sizes, torch.float64)
    assert min(len(case.cp_map.response_index(rank)) for rank in range(4)) == 0
    _check(case, rank_pool.run(f"{RANKS}:context_parallel", world=4, sizes=sizes, dtype=torch.float64), torch.float64)


def test_context_parallel_without_samples_sends_nothing(rank_pool: RankPool) -> None:
    for found in rank_pool.run(f"{RANKS}:context_parallel", world=2, sizes=[], dtype=torch.float64):
        assert found["advantages"].shape == found["sums"].shape == (0,) and found["gathered"].shape == (4, 0)
        assert found["collectives"].tolist() == [0] * 6


def test_context_parallel_advantages_equal_the_reference_loop(rank_pool: RankPool) -> None:
    sizes = every_length(2)
    case = cp_case(2, sizes, torch.float64)
    results = rank_pool.run(f"{RANKS}:context_parallel", world=2, sizes=sizes, dtype=torch.float64)
    whole = {name: torch.empty(len(case.mask), dtype=torch.float64) for name in ("rewards", "advantages", "returns")}
    for rank, found in enumerate(results):
        for name, column in whole.items():
            column[torch.from_numpy(case.cp_map.response_index(rank))] = found[name]
    columns = [torch.split(x, case.lens.tolist()) for x in (case.mask, case.values, *whole.values())]
    for s, (mask, values, rewards, advantages, returns) in enumerate(zip(*columns, strict=True)):
        numbers = (rewards[mask].tolist(), values[mask].tolist())
        after = float(case.bootstrap_values[s])
        expected = reference.gae(*numbers, gamma=GAE["gamma"], lambd=GAE["lambd"], after=after)
        critic_side = reference.gae(*numbers, gamma=GAE["gamma"], lambd=GAE["lambd_critic"], after=after)
        assert advantages[mask].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)
        assert returns[mask].tolist() == pytest.approx(
            [v + a for v, a in zip(numbers[1], critic_side, strict=True)], rel=1e-10, abs=1e-10
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("cp_size", "dp_size"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_whiten_over_context_and_data_parallel_ranks_equals_no_split(
    rank_pool: RankPool, cp_size: int, dp_size: int, dtype: torch.dtype
) -> None:
    # one sample of one token per data-parallel rank and a longer one: some ranks own no token
    sizes = [(1, 1), (2, 1), (3, 17), (1, 2)]
    results = rank_pool.run(f"{RANKS}:whiten_over_cp_and_dp", world=cp_size * dp_size, cp_size=cp_size, sizes=sizes, dtype=dtype)
    case = cp_case(cp_size, sizes, dtype)
    whole = torch.full((len(case.mask),), torch.nan, dtype=dtype)
    for rank, found in enumerate(results):
        dp_rank, cp_rank = divmod(rank, cp_size)
        context, tokens = data_parallel_share(cp_size, sizes, dp_rank, dp_size, cp_rank=cp_rank)
        whole[tokens[context.index]] = found
    kept = (1000 + 0.01 * case.values)[case.mask].double()
    expected = torch.zeros(len(case.mask), dtype=torch.float64)
    expected[case.mask] = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    assert _close(whole, expected, dtype)
