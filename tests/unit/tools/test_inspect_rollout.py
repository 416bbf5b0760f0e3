"""inspect_rollout.py: which samples it shows, and what stands in its table."""

from pathlib import Path

import numpy as np
import pytest

from slime_ppo.rollout.dump import RolloutDump, RolloutHeader, write_dump
from tests.helpers.rollout_samples import make_samples, make_training, plain_samples
from tools import inspect_rollout

HEADER = RolloutHeader(3, "model:\n  hf_checkpoint: nowhere\n", {})


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A file with columns, in which sample 12 has the largest gap."""
    samples = plain_samples()
    training = make_training(samples)
    gap = np.zeros(10, np.float32)
    gap[[1, 4, 6, 9]] = (9.0, 9.0, 9.0, 0.25)  # the first three are masked tokens
    gap[7] = -0.5
    training.batch.old_log_probs[:] = training.batch.rollout_log_probs + gap  # type: ignore[index]
    write_dump(tmp_path / "trained.npz", RolloutDump(HEADER, samples, training))
    return str(tmp_path / "trained.npz")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert inspect_rollout.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def sample_ids(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("sample ")]


def test_summary_tells_what_the_file_holds(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, trained, "--num", "0") == [
        f"{trained}: rollout 3, samples, columns and 4 planned steps",
        "4 samples, 10 response tokens, 7 of them trainable; reward 0.25 (min 0.1, max 0.4)",
        "kl_coef 0.3; first lr critic 0.001, actor 0.0001",
    ]


def test_dry_run_reads_the_file_and_shows_no_sample(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, trained, "--dry-run", "--num", "3") == shown(capsys, trained, "--num", "0")


def test_number_of_samples_below_zero_is_refused(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        inspect_rollout.main((trained, "--num", "-1"))
    assert ended.value.code == 2 and "--num -1: expected a number of samples" in capsys.readouterr().err


def test_samples_are_the_first_ones_those_named_or_those_with_the_largest_gap_of_a_trainable_token(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample_ids(shown(capsys, trained)) == [10]
    assert sample_ids(shown(capsys, trained, "--num", "3")) == [10, 11, 12]
    assert sample_ids(shown(capsys, trained, "--sample-id", "13", "--sample-id", "11")) == [13, 11]
    assert sample_ids(shown(capsys, trained, "--worst-gap", "--num", "2")) == [12, 13]


def test_table_has_a_line_per_token_with_the_columns_of_the_file_aligned(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, trained, "--sample-id", "12")
    head = next(line for line in lines if line.lstrip().startswith("#"))
    rows = lines[lines.index(head) + 1 :]
    assert head.split() == ["#", "token", "mask", "engine", "old", "value", "advantage", "gap"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"] and {len(row) for row in rows} == {len(head)}
    sample = plain_samples()[2]
    for position, row in enumerate(rows):
        cells = row.split()
        assert cells[1:3] == [str(sample.response_ids[position]), str(int(sample.loss_mask[position]))]
        assert float(cells[3]) == pytest.approx(sample.rollout_log_probs[position], abs=1e-4)
        assert float(cells[5]) == pytest.approx((5 + position) / 10) and float(cells[6]) == 1 - (5 + position)
    assert rows[2].split()[-1] == "-5.0e-01"
    text = "\n".join(lines)
    assert "sample 12  group 1  reward 0.3  finish length  2 + 4 tokens  weight version 1, 2" in text and "'A cat'" in text
    assert "\x1b" not in text, "colours are for terminals"


def test_terminal_gets_colours_by_sign_and_dimmed_masked_tokens() -> None:
    samples = plain_samples()
    training = make_training(samples)
    text = inspect_rollout.sample_text(samples[0], training.batch.select([0]), lambda ids: ["a", "\n", "c"], colour=True)
    first, masked, last = text.splitlines()[-3:]
    assert "\x1b[32m   1.0000\x1b[0m" in first and "\x1b[31m  -1.0000\x1b[0m" in last
    assert masked.startswith("\x1b[2m") and "'\\n'" in masked


def test_samples_alone_show_supports_and_no_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path / "x.npz", RolloutDump(HEADER, make_samples()[:1]))
    lines = shown(capsys, str(tmp_path / "x.npz"))
    assert lines[0].endswith("rollout 3, samples only")
    assert "label     'open'" in lines
    assert [line.split()[-2:] for line in lines[-4:]] == [
        ["engine", "support"],
        *[[line.split()[-2], n] for line, n in zip(lines[-3:], "212", strict=True)],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sample-id", "99"), "--sample-id 99: not in this rollout, which has samples 10 to 13"),
        (("--hf-checkpoint", "nowhere"), "model folder nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    trained: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], message: str
) -> None:
    assert inspect_rollout.main([trained, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_worst_gap_before_training_has_made_log_probs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path / "x.npz", RolloutDump(HEADER, plain_samples()))
    assert inspect_rollout.main([str(tmp_path / "x.npz"), "--worst-gap"]) == 2
    assert "no old log-probs yet" in capsys.readouterr().err
