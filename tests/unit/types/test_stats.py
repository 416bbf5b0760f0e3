"""Statistics add up: a mean is reduced once from sums and counts."""

from slime_ppo.types.stats import Stats, merge_stats, prefixed


def _stats(total: float, count: float, *, share: float, largest: float) -> Stats:
    stats = Stats()
    stats.add_mean("kl", total, count)
    stats.add_total("loss", share)
    stats.add_max("gap", largest)
    return stats


def test_merge_ranks_of_different_size_gives_the_mean_over_all_tokens() -> None:
    """(3 + 9) / (1 + 5) = 2, not the mean of 3 and 1.8."""
    merged = merge_stats([_stats(3.0, 1, share=0.25, largest=-1.0), _stats(9.0, 5, share=0.5, largest=-3.0)])
    assert merged.result() == {"kl": 2.0, "loss": 0.75, "gap": -1.0}


def test_result_metric_without_any_token_is_left_out() -> None:
    stats = Stats()
    stats.add_mean("kl", 0.0, 0)
    stats.add_value("lr", 1e-6)
    assert stats.result() == {"lr": 1e-6}


def test_merge_rank_without_tokens_changes_no_mean() -> None:
    empty = Stats()
    empty.add_mean("kl", 0.0, 0)
    assert merge_stats([_stats(4.0, 2, share=0, largest=0), empty, Stats()]).result()["kl"] == 2.0


def test_merge_does_not_change_its_parts() -> None:
    part = _stats(1.0, 1, share=1.0, largest=1.0)
    merge_stats([part, part])
    assert part.result() == {"kl": 1.0, "loss": 1.0, "gap": 1.0}


def test_prefixed_puts_the_prefix_before_each_name() -> None:
    assert prefixed("train", {"kl": 1.0}) == {"train/kl": 1.0}
