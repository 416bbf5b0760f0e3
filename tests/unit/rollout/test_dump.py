"""Rollout files: what is written is read again to the bit, a file is whole or said to be broken."""

import errno
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.errors import DataError
from slime_ppo.rollout.dump import DumpWriter, RolloutDump, RolloutHeader, read_dump, read_header, write_dump
from tests.helpers.rollout_samples import assert_same, assert_same_samples, make_samples, make_training, plain_samples

HEADER = RolloutHeader(3, "run:\n  seed: 1\n", {"vocab_size": 100})


def test_read_gives_back_samples_columns_plan_rates_and_header(tmp_path: Path) -> None:
    samples, file = plain_samples(), tmp_path / "a" / "rollout.npz"
    training = make_training(samples)
    write_dump(file, RolloutDump(HEADER, samples, training))
    found = read_dump(file)
    assert read_header(file) == found.header == HEADER
    assert_same_samples(found.samples, samples)
    assert_same(found.training, training)
    assert [path.name for path in file.parent.iterdir()] == ["rollout.npz"]


def test_read_of_samples_alone_has_no_training(tmp_path: Path) -> None:
    write_dump(tmp_path / "x", RolloutDump(HEADER, make_samples()))
    found = read_dump(tmp_path / "x")
    assert found.training is None
    assert_same_samples(found.samples, make_samples())


def test_file_is_plain_arrays_without_pickle_and_equal_rollouts_are_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_dump(tmp_path / name, RolloutDump(HEADER, make_samples()))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with np.load(tmp_path / "a", allow_pickle=False) as arrays:
        assert arrays["samples/sample_ids"].tolist() == [10, 11, 12, 13]
        assert json.loads(arrays["header.json"])["rollout_id"] == 3


def test_writer_names_files_by_rollout_and_replaces_samples_by_samples_and_columns(tmp_path: Path) -> None:
    writer, samples = DumpWriter(str(tmp_path / "r{rollout_id}.npz"), HEADER.config, HEADER.model), plain_samples()
    writer.save(3, samples)
    writer.save(3, samples, make_training(samples))
    writer.save(4, samples)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r3.npz", "r4.npz"]
    assert read_dump(tmp_path / "r3.npz").training is not None
    assert read_header(tmp_path / "r4.npz").rollout_id == 4


def test_write_without_room_names_the_flag_and_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rollout.npz"
    write_dump(file, RolloutDump(HEADER, make_samples()))
    before = file.read_bytes()

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(DataError, match=r"rollout 3 cannot be written to .*--save-debug-rollout-data.*No space left"):
        write_dump(file, RolloutDump(HEADER, make_samples()[:2]))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rollout.npz"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_read_of_a_truncated_file_names_it(tmp_path: Path, share: float) -> None:
    write_dump(tmp_path / "whole", RolloutDump(HEADER, make_samples()))
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="cut is no whole rollout file"):
        read_dump(tmp_path / "cut")


def test_read_of_a_changed_byte_names_the_file(tmp_path: Path) -> None:
    write_dump(tmp_path / "whole", RolloutDump(HEADER, make_samples()))
    content = bytearray((tmp_path / "whole").read_bytes())
    content[content.index(b"samples/response_ids.npy") + 160] ^= 1
    (tmp_path / "whole").write_bytes(content)
    with pytest.raises(
        DataError, match="whole is no whole rollout file .BadZipFile: Bad CRC-32 for file 'samples/response_ids.npy'"
    ):
        read_dump(tmp_path / "whole")


def test_read_of_other_files_says_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no rollout file .*absent: was it saved by --save-debug-rollout-data"):
        read_header(tmp_path / "absent")
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    with pytest.raises(DataError, match=r"other.npz has no header.json"):
        read_header(tmp_path / "other.npz")
    for kind, number in (("other", 1), ("slime_ppo rollout", 1)):
        with zipfile.ZipFile(tmp_path / "z", "w") as archive:
            archive.writestr("header.json", json.dumps({"kind": kind, "format": number}))
        with pytest.raises(DataError, match=rf"'{kind}' of format {number}, expected 'slime_ppo rollout' of format 2"):
            read_header(tmp_path / "z")


def test_read_of_arrays_that_do_not_fit_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rollout.npz"
    write_dump(file, RolloutDump(HEADER, make_samples()))
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != "samples/rewards.npy"}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match=r"rollout.npz: the arrays of samples do not fit together .KeyError: 'rewards'"):
        read_dump(file)


def test_read_header_names_what_a_damaged_header_lacks(tmp_path: Path) -> None:
    write_dump(tmp_path / "whole.npz", RolloutDump(HEADER, plain_samples(), None))
    with zipfile.ZipFile(tmp_path / "whole.npz") as archive:
        header = json.loads(archive.read("header.json"))
    with zipfile.ZipFile(tmp_path / "cut.npz", "w") as archive:
        archive.writestr("header.json", json.dumps({key: header[key] for key in ("kind", "format", "rollout_id")}))
    with pytest.raises(DataError, match=r"cut.npz has no config, model in its header.json"):
        read_header(tmp_path / "cut.npz")
