"""Tensors of a folder as a tree of their names, in which layers and experts that are alike are one line. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from slime_ppo.conversion.console import size_words


@dataclass(frozen=True)
class TreeEntry:
    """A tensor, or (shape None) something else that was stored under a name; `digest` is empty when nobody asked for it."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    num_bytes: int
    digest: str = ""

    @property
    def numel(self) -> int:
        return 0 if self.shape is None else prod(self.shape)


@dataclass
class _Node:
    entry: TreeEntry | None = None
    children: "dict[str, _Node]" = field(default_factory=dict)

    def entries(self) -> Iterator[TreeEntry]:
        if self.entry is not None:
            yield self.entry
        for child in self.children.values():
            yield from child.entries()

    def looks(self) -> tuple[object, ...]:
        """What two nodes must have in common to be one line."""
        own = None if self.entry is None else (self.entry.dtype, self.entry.shape, self.entry.digest)
        return own, *((name, child.looks()) for name, child in self.children.items())


def draw_tree(entries: Iterable[TreeEntry], *, fold: bool, depth: int | None) -> list[str]:
    """Lines of name, type, shape, bytes and digest, in columns. `fold`: neighbours that are numbered and alike are one line.
    `depth`: levels to show, the rest as sums; None: all."""
    root = _Node()
    for entry in entries:
        node = root
        for part in entry.name.split("."):
            node = node.children.setdefault(part, _Node())
        node.entry = entry
    rows = [row for label, node, count in _groups(root, fold) for row in _rows(label, node, count, fold=fold, depth=depth, level=0)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return [
        f"{label:{widths[0]}}  {dtype:{widths[1]}}  {shape:{widths[2]}}  {size:>{widths[3]}}  {digest}".rstrip()
        for label, dtype, shape, size, digest in rows
    ]


def _groups(node: _Node, fold: bool) -> Iterator[tuple[str, _Node, int]]:
    """(label, node, how many are alike) of the children."""
    found: list[tuple[list[str], _Node]] = []
    for name, child in sorted(node.children.items(), key=lambda item: _order(item[0])):
        alike = fold and found and name.isdecimal() and found[-1][0][-1].isdecimal() and found[-1][1].looks() == child.looks()
        if alike:
            found[-1][0].append(name)
        else:
            found.append(([name], child))
    for names, child in found:
        yield names[0] if len(names) == 1 else f"{{{names[0]}-{names[-1]}}}", child, len(names)


def _order(name: str) -> int:
    """Numbers by value; everything else as it came."""
    return int(name) if name.isdecimal() else -1


def _rows(
    label: str, node: _Node, count: int, *, fold: bool, depth: int | None, level: int
) -> Iterator[tuple[str, str, str, str, str]]:
    while node.entry is None and len(node.children) == 1:  # a name with one continuation is one line with it
        ((name, node),) = node.children.items()
        label += f".{name}"
    indent, entry = "  " * level, node.entry
    if entry is not None and not node.children:
        shape = "" if entry.shape is None else str(list(entry.shape))
        yield indent + label, entry.dtype, shape, size_words(entry.num_bytes * count), entry.digest
        return
    entries = list(node.entries())
    total = size_words(count * sum(one.num_bytes for one in entries))
    each = f" x {count}" if count > 1 else ""
    yield f"{indent}{label}", f"{len(entries)} tensors{each}", "", total, ""
    if depth is None or level + 1 < depth:
        for name, child, alike in _groups(node, fold):
            yield from _rows(name, child, alike, fold=fold, depth=depth, level=level + 1)


def totals(entries: Sequence[TreeEntry]) -> str:
    """As in "38 tensors, 0.9 million numbers, 3.5 MB"."""
    numbers = sum(entry.numel for entry in entries)
    unit, factor = ("billion", 1e9) if numbers >= 1e9 else ("million", 1e6)
    return f"{len(entries)} tensors, {numbers / factor:.1f} {unit} numbers, {size_words(sum(one.num_bytes for one in entries))}"
