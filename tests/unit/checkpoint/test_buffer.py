"""Samples come back from their file bit for bit, and a damaged file is named."""

from pathlib import Path

import pytest

from slime_ppo.checkpoint.buffer import read_samples, write_samples
from slime_ppo.errors import CheckpointError
from tests.helpers.saved_runs import make_sample, same_samples


def test_samples_come_back_bit_for_bit_whatever_they_hold(tmp_path: Path) -> None:
    samples = [make_sample(4, full=True), make_sample(5, full=False), make_sample(6, full=True)]
    write_samples(tmp_path / "b.npz", samples)
    back = read_samples(tmp_path / "b.npz")
    assert same_samples(back, samples)
    assert back[0].reward == 0.1 + 0.2 and back[0].prompt.metadata == {"level": 3}
    assert not same_samples(back, [samples[0], samples[2], samples[1]])


@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_samples_of_a_file_that_was_cut_are_refused_by_name(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "b.npz"
    write_samples(path, [make_sample(0, full=True)])
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CheckpointError, match=r"the samples in .*b\.npz cannot be read"):
        read_samples(path)
