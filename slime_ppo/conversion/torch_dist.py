"""How Megatron's torch_dist folders name the parameters of a model, and which part of each is on one rank. No torch.

Every layer has names of its own (Megatron's "non_homogeneous_layers"); the experts of a layer are one tensor with the expert as
its first dimension. Vocabulary padding is not stored, and a tied embedding is stored once, so that a checkpoint says nothing of
the layout that wrote it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.table import ConversionTable

METADATA_FILE = ".metadata"
BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
HF_FOLDER = "hf"
"""In an iteration's folder: config.json and tokenizer files, without which weights can't be understood."""
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
OPTIMIZER_PREFIX = "optimizer.state."
RNG_PREFIX = "rng_state/"


@dataclass(frozen=True)
class Band:
    """Rows `first_row` ... of a rank's part of a parameter, and where the first element of them is in the whole parameter."""

    first_row: int
    num_rows: int
    row: int
    column: int


@dataclass(frozen=True)
class Rectangle:
    """Elements [flat_start, flat_start + prod(sizes)) of a rank's part, which are a rectangle of the stored tensor."""

    flat_start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where one rank's part of a parameter, `local_shape` [R] or [R, C], lies in the stored tensor `key` of shape `whole`.

    `expert` is the number along the first dimension of `whole`, None where there is no such dimension. `of_vocabulary`: a row per
    token; Megatron's own folders store rows of padding, too.
    """

    key: str
    whole: tuple[int, ...]
    local_shape: tuple[int, ...]
    bands: tuple[Band, ...]
    expert: int | None
    of_vocabulary: bool

    @property
    def padded(self) -> bool:
        """True when the part has rows that are not stored."""
        return sum(band.num_rows for band in self.bands) < self.local_shape[0]

    def rectangles(self, start: int, end: int) -> Iterator[Rectangle]:
        """Elements [start, end) of the flattened part, as rectangles: of a range of matrix elements up to three per band."""
        width = self.local_shape[1] if len(self.local_shape) > 1 else 1
        for band in self.bands:
            first, last = band.first_row * width, (band.first_row + band.num_rows) * width
            for at, rows, columns in _cut(max(start, first), min(end, last), width):
                row, column = divmod(at, width)
                offsets = (band.row + row - band.first_row, band.column + column)[: len(self.local_shape)]
                sizes = (rows, columns)[: len(self.local_shape)]
                if self.expert is not None:
                    offsets, sizes = (self.expert, *offsets), (1, *sizes)
                yield Rectangle(at, offsets, sizes)


def _cut(start: int, end: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(first element, rows, columns) of: the rest of a begun row, whole rows, the beginning of a last row."""
    if start < end and start % width:
        stop = min(end, start - start % width + width)
        yield start, 1, stop - start
        start = stop
    if end - start >= width:
        rows = (end - start) // width
        yield start, rows, width
        start += rows * width
    if start < end:
        yield start, 1, end - start


def place_of(rule: Rule, table: ConversionTable, local_shape: tuple[int, ...], *, size: int, rank: int) -> Place:
    """The place of a part that is split over `size` ranks, of rank `rank` among them. `rule` has layer and expert filled in."""
    key, expert = stored_name(rule, table)
    rows, columns = local_shape[0], local_shape[1:]
    bands: tuple[Band, ...] = (Band(0, rows, rank * rows, 0),)
    whole: tuple[int, ...] = (rows * size, *columns)
    if rule.split is Split.REPLICATED:
        bands, whole = (Band(0, rows, 0, 0),), local_shape
    elif rule.split is Split.ROW:
        bands, whole = (Band(0, rows, 0, rank * columns[0]),), (rows, columns[0] * size)
    elif rule.split is Split.VOCAB:
        vocab_size = table.shape.vocab_size
        bands = (Band(0, min(max(vocab_size - rank * rows, 0), rows), rank * rows, 0),)
        whole = (vocab_size, *columns)
    elif rule.split is Split.GATE_UP:
        half = rows // 2
        bands = tuple(Band(part * half, half, (part * size + rank) * half, 0) for part in (0, 1))
    if expert is not None:
        whole = (table.shape.num_experts, *whole)
    return Place(key, whole, local_shape, bands, expert, of_vocabulary=rule.split is Split.VOCAB)


def stored_name(rule: Rule, table: ConversionTable) -> tuple[str, int | None]:
    """(name in the folder, number of the expert or None). A tied output layer has the name of the embedding."""
    if is_tied_copy(rule, table):
        return "embedding.word_embeddings.weight", None
    matched = re.fullmatch(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)", rule.megatron)
    if matched is None:
        return rule.megatron, None
    return f"{matched[1]}.experts.{matched[3]}", int(matched[2])


def is_tied_copy(rule: Rule, table: ConversionTable) -> bool:
    """True for the output layer of a model whose output layer is its embedding: the last pipeline stage has a copy."""
    return rule.megatron == "output_layer.weight" and table.head == "language_model" and table.shape.tie_word_embeddings
