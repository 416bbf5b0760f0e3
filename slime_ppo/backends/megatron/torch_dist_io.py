"""A rank's part of a torch_dist folder: rectangles of tensors that are its own memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slime_ppo.conversion.torch_dist_read import Region
from slime_ppo.conversion.torch_dist_write import Chunk, Written, write_file


@dataclass(frozen=True)
class Piece:
    """A rectangle of the stored tensor `key`, which is `whole` in all; `tensor` has the rectangle's shape. `of_vocabulary`: a
    tensor with more rows will do, too."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    of_vocabulary: bool

    def fits(self, whole: tuple[int, ...]) -> bool:
        """True when the rectangle can be read from a tensor of this shape."""
        return whole == self.whole or (self.of_vocabulary and whole[1:] == self.whole[1:] and whole[0] > self.whole[0])

    @property
    def region(self) -> Region:
        """Where it is read from."""
        return Region(self.key, self.offsets, tuple(self.tensor.shape))

    @property
    def chunk(self) -> Chunk:
        """What is written."""
        return Chunk(self.key, self.whole, self.offsets, tuple(self.tensor.shape), self.tensor.dtype, lambda: self.tensor)

    def detached(self) -> "Piece":
        """With a copy of the numbers in host memory."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


class RankWriter:
    """One rank's file: `pieces`, and `objects` by key, as bytes."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], objects: Mapping[str, bytes], *, rank: int) -> None:
        self._path = folder / f"__{rank}_0.distcp"
        self._pieces = list(pieces)
        self._objects = objects

    def detach(self) -> None:
        """Copy what is to be written to the host, so that training may go on."""
        self._pieces = [piece.detached() for piece in self._pieces]

    def write(self) -> Written:
        """Write and flush the file."""
        return write_file(self._path, self._objects, (piece.chunk for piece in self._pieces))
