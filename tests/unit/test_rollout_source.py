"""Rollouts that come from files: they must be those that this run would have made."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.root import Config
from slime_ppo.errors import DataError
from slime_ppo.rollout.dump import DumpWriter
from slime_ppo.rollout_source import DumpedRollouts, check_dumps
from slime_ppo.tracking.clock import RunClock
from slime_ppo.types.sample import Prompt, Sample
from tests.helpers.configs import make_config, write_model_folder
from tests.helpers.rollout_samples import assert_same_samples, make_samples


class Prompts:
    """Gives the same prompts at every draw."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts, self.drawn = prompts, 0

    def next_prompts(self, n: int) -> list[Prompt]:
        self.drawn += n
        return self.prompts[:n]


def prompts_of(samples: list[Sample]) -> list[Prompt]:
    return list({id(sample.prompt): sample.prompt for sample in samples}.values())


def dumped(where: Path, prompts: list[Prompt], samples: list[Sample] | None = None) -> DumpedRollouts:
    """Rollouts 0 and 1 in files, for a run that draws `prompts`."""
    writer = DumpWriter(str(where), "", {})
    for rollout_id in range(2):
        writer.save(rollout_id, make_samples() if samples is None else samples)
    source: Any = Prompts(prompts)
    return DumpedRollouts(str(where), source, num_prompts=2, clock=RunClock())


def test_collect_gives_the_samples_of_the_file_and_draws_the_prompts_of_the_run(tmp_path: Path) -> None:
    samples = make_samples()
    rollouts = dumped(tmp_path, prompts_of(samples), samples)
    rollouts.connect()
    rollouts.use_weights(1)
    assert_same_samples(rollouts.collect(1, 1), samples)
    assert vars(rollouts)["_prompts"].drawn == 2
    # one whose samples were all dropped leaves no trace in the file
    only_first = dumped(tmp_path, prompts_of(samples), samples[:2])
    assert_same_samples(only_first.collect(0, 1), samples[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda prompt: replace(prompt, index=8),
            r"rollout 0 of .* answers row 7 of its prompt file .'The door was'.*--prompt-data",
        ),
        (lambda prompt: replace(prompt, token_ids=np.array([4, 5, 7], np.int32)), r"row 7 .*, 3 tokens, .* other tokens there .3."),
        (lambda prompt: replace(prompt, token_ids=np.array([4], np.int32)), r"row 7 .* tokens there .1.*tokenizer"),
    ],
)
def test_collect_prompts_that_this_run_does_not_draw_are_an_error(
    tmp_path: Path, change: Callable[[Prompt], Prompt], message: str
) -> None:
    first, second = prompts_of(make_samples())
    with pytest.raises(DataError, match=message):
        dumped(tmp_path, [change(first), second]).collect(0, 1)


def test_collect_of_another_weight_version_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = dumped(tmp_path, prompts_of(make_samples()))
    with caplog.at_level(logging.WARNING):
        rollouts.collect(0, 0)
        rollouts.collect(1, 0)
    [record] = caplog.records
    assert "rollout 0 of" in record.getMessage() and "weight version 1, 2, the trainer is at 0" in record.getMessage()


def saved(tmp_path: Path, **values: Value) -> tuple[Config, ModelShape]:
    """Rollouts 0 and 1 of a run with these settings, in tmp_path/dumps."""
    folder = write_model_folder(tmp_path / "model")
    config = make_config(run__num_rollout=2, model__hf_checkpoint=str(folder), **values)
    shape = ModelShape.from_hf_folder(folder)
    writer = DumpWriter(str(tmp_path / "dumps"), config.to_yaml(), shape.plain_values())
    for rollout_id in range(2):
        writer.save(rollout_id, make_samples())
    return config, shape


def test_check_dumps_of_the_same_run_with_other_training_settings_passes(tmp_path: Path) -> None:
    config, shape = saved(tmp_path)
    check_dumps(config, str(tmp_path / "dumps"), shape)
    changed = replace(config, optimizer=replace(config.optimizer, lr=0.5), parallel=replace(config.parallel, actor_num_nodes=2))
    check_dumps(changed, str(tmp_path / "dumps"), replace(shape, eos_token_ids=(1, 2)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run__num_rollout": 3}, r"no file of rollout 2 .*rollouts 0 to 2.*--num-rollout to 2"),
        ({"run__seed": 5}, r"rollout_0000000.npz: the run that made it has --seed 0, this run has 5"),
        ({"rollout__rollout_temperature": 0.5}, r"--rollout-temperature 1.0, this run has 0.5"),
        ({"rollout__rollout_top_p": 0.9}, r"--rollout-top-p 1.0, this run has 0.9"),
        ({"rollout__rollout_batch_size": 64}, r"--rollout-batch-size 128, this run has 64"),
        ({"ppo__truncation_policy": "mask"}, r"--truncation-policy terminal, this run has mask"),
    ],
)
def test_check_dumps_refuses_other_settings_and_missing_files(tmp_path: Path, values: dict[str, Value], message: str) -> None:
    _, shape = saved(tmp_path)
    with pytest.raises(DataError, match=message):
        check_dumps(make_config(**({"run__num_rollout": 2} | values)), str(tmp_path / "dumps"), shape)


def test_check_dumps_of_a_run_that_goes_on_needs_no_files_of_what_is_done(tmp_path: Path) -> None:
    config, shape = saved(tmp_path)
    (tmp_path / "dumps" / "rollout_0000000.npz").unlink()
    check_dumps(config, str(tmp_path / "dumps"), shape, first=1)
    with pytest.raises(DataError, match=r"no file of rollout 0 .*rollouts 0 to 1: save the missing ones$"):
        check_dumps(config, str(tmp_path / "dumps"), shape)


def test_check_dumps_refuses_another_model_and_a_renamed_file(tmp_path: Path) -> None:
    config, shape = saved(tmp_path)
    with pytest.raises(DataError, match=r"the model has vocab_size 1024, this run has 2048"):
        check_dumps(config, str(tmp_path / "dumps"), replace(shape, vocab_size=2048))
    (tmp_path / "dumps" / "rollout_0000001.npz").replace(tmp_path / "dumps" / "rollout_0000000.npz")
    with pytest.raises(DataError, match=r"rollout_0000000.npz holds rollout 1, expected 0: was it renamed"):
        check_dumps(config, str(tmp_path / "dumps"), shape)
