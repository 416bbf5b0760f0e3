"""Metrics as they are collected: a mean is a (sum, count) pair that is reduced once; totals add up; a maximum stays one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Means, totals and maxima by metric name; adding two objects adds up what two ranks or micro-batches saw."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add_mean(self, name: str, total: float, count: float) -> None:
        """`total` is the sum over `count` tokens or samples. count 0 leaves the metric without a value."""
        self.sums[name] = self.sums.get(name, 0.0) + float(total)
        self.counts[name] = self.counts.get(name, 0.0) + float(count)

    def add_value(self, name: str, value: float) -> None:
        """A number that every rank knows alike (a gradient norm, a learning rate): the mean of equal numbers."""
        self.add_mean(name, value, 1.0)

    def add_total(self, name: str, share: float) -> None:
        """A share of a number whose parts add up, such as a loss that is already divided by the step's denominator."""
        self.totals[name] = self.totals.get(name, 0.0) + float(share)

    def add_max(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def update(self, other: "Stats") -> None:
        for name, total in other.sums.items():
            self.add_mean(name, total, other.counts[name])
        for name, share in other.totals.items():
            self.add_total(name, share)
        for name, value in other.maxima.items():
            self.add_max(name, value)

    def result(self) -> dict[str, float]:
        """Name -> value; metrics without any token or sample are left out."""
        means = {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name] > 0}
        return means | self.totals | self.maxima


def merge_stats(parts: Iterable[Stats]) -> Stats:
    """Add up the statistics of several ranks, in the order given (so that sums are reproducible)."""
    merged = Stats()
    for part in parts:
        merged.update(part)
    return merged


def prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """`{"a": 1}` -> `{"prefix/a": 1}`."""
    return {f"{prefix}/{name}": value for name, value in values.items()}
