"""The list of complete checkpoints: which are kept, what belongs to one, and where it lies."""

from pathlib import Path

import pytest

from slime_ppo.checkpoint.run_state import Checkpoint, RunState, path_in


def saved_after(*rollouts: int, buffer: str | None = None) -> list[Checkpoint]:
    return [Checkpoint(one, {"actor": f"actor/iter_{one}"}, f"state_{one}", f"sha-{one}", buffer) for one in rollouts]


def rollouts(state: RunState) -> list[int]:
    return [one.rollout_id for one in state.checkpoints]


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [4, 6]), (9, [2, 4, 6]), (None, [2, 4, 6])])
def test_with_checkpoint_keeps_the_newest_as_many_as_asked_for(keep: int | None, left: list[int]) -> None:
    state = RunState("run", tuple(saved_after(2, 4)))
    assert rollouts(state.with_checkpoint(*saved_after(6), keep=keep)) == left


def test_with_checkpoint_takes_the_place_of_one_of_the_same_rollout() -> None:
    state = RunState("run", tuple(saved_after(2, 4)))
    [again] = saved_after(4, buffer="buffer_4")
    assert state.with_checkpoint(again, keep=2).checkpoints == (*saved_after(2), again)
    assert again.paths == ("actor/iter_4", "state_4", "buffer_4") and again.buffered


def test_until_keeps_the_one_that_is_gone_back_to() -> None:
    assert rollouts(RunState("run", tuple(saved_after(2, 4, 6))).until(4)) == [2, 4]


def test_path_in_is_relative_inside_the_run_folder_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert path_in(run, run / "actor" / "iter_2") == "actor/iter_2"
    for outside in ("run2", "critics"):  # the first begins with the run folder's name
        assert path_in(run, tmp_path / outside / "iter_2") == f"{tmp_path}/{outside}/iter_2"
