"""The table of contents of what several ranks have written."""

from pathlib import Path

import pytest
import torch

from slime_ppo.backends.megatron.torch_dist_io import Piece, RankWriter
from slime_ppo.conversion.torch_dist_read import TorchDistReader
from slime_ppo.conversion.torch_dist_write import write_metadata
from slime_ppo.errors import CheckpointError


def test_write_metadata_of_files_that_are_on_another_nodes_disk_asks_for_a_shared_folder(tmp_path: Path) -> None:
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    written = []
    for rank, folder in enumerate(nodes):
        folder.mkdir()
        piece = Piece("weight", (4, 2), (2 * rank, 0), torch.full((2, 2), float(rank)), of_vocabulary=False)
        written.append(RankWriter(folder, [piece], {}, rank=rank).write())
    with pytest.raises(CheckpointError, match=r"has no __1_0\.distcp where the first rank runs.*the same one on all nodes"):
        write_metadata(nodes[0], written)
    assert not (nodes[0] / ".metadata").exists()
    (nodes[1] / "__1_0.distcp").rename(nodes[0] / "__1_0.distcp")
    write_metadata(nodes[0], written)
    assert TorchDistReader(nodes[0]).read_whole("weight").tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
