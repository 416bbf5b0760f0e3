"""replay_step.py on a pool that does not compute: layouts, checks, comparison, exit codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from slime_ppo.rollout.dump import RolloutDump, RolloutHeader, TrainingDump, write_dump
from tests.helpers.configs import make_config, write_model_folder
from tests.helpers.rollout_samples import make_training, plain_samples
from tools import replay_step
from tools.layouts import replay
from tools.layouts.replay import Comparison, Layout, Replayed, Start, Tolerance, config_of, laid_out, step_error


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_model_folder(tmp_path / "model"))


def dump(folder: str, training: TrainingDump | None, **values: Any) -> RolloutDump:
    """A rollout of a run on GPUs with SGLang's servers on two nodes, whose critic has a layout of its own."""
    config = make_config(
        model__hf_checkpoint=folder,
        data__rollout_max_prompt_len=32,
        cluster__device="cuda",
        rollout__engine="sglang",
        rollout__rollout_num_gpus=16,
        parallel__actor_num_nodes=2,
        parallel__actor_num_gpus_per_node=8,
        critic__num_gpus_per_node=4,
        critic__lr=0.5,
        rollout__rollout_batch_size=4,
        batch__global_batch_size=4,
        **values,
    )
    return RolloutDump(RolloutHeader(3, config.to_yaml(), {}), plain_samples(), training)


class Pool:
    """Ranks whose metrics and weights in layout tp2 are off by so much."""

    def __init__(self, metric: float = 0.0, weight: float = 0.0) -> None:
        self.metric, self.weight = metric, weight
        self.worlds: list[int] = []

    def run(self, target: str, *, world: int, **kwargs: Any) -> list[Any]:
        assert target == "tools.layouts.replay_ranks:replay"
        self.worlds.append(world)
        off = self.metric if kwargs["config"].parallel.tensor_model_parallel_size == 2 else 0.0
        steps = [{"loss": 2.0 + off, "grad_norm": 1.0, "value_loss": 0.5}, {"skipped": 1.0}]
        return [{role: Replayed(steps, fit=0.2 if role == "critic" else 0.0) for role in kwargs["folders"]}]


def compare(monkeypatch: pytest.MonkeyPatch, folder: str, pool: Pool) -> Comparison:
    """Two layouts of two steps."""
    monkeypatch.setattr(
        replay, "weights_difference", lambda first, own: pool.weight if own != first and own.endswith("actor") else 0.0
    )
    training = make_training(plain_samples())
    starts: dict[RoleName, Start] = {"actor": Start.of(folder), "critic": Start.of(folder)}
    one = config_of(dump(folder, training), Path("dumps/x.npz"), starts)
    configs = {name: replay.checked(one, Layout.parse(name), ["actor", "critic"]) for name in ("1", "tp2-dp2")}
    return replay.replay(pool, configs, training, starts, with_optimizer=False)


def test_layout_is_sizes_by_name_and_experts_are_split_like_the_rest_unless_said() -> None:
    found = Layout.parse("tp2-pp2-cp1-dp3-mbs4")
    assert found.num_ranks == 12 and found.sizes["etp"] == 2 and found.sizes["mbs"] == 4
    assert Layout.parse("1").num_ranks == 1 and "mbs" not in Layout.parse("1").sizes
    assert Layout.parse("tp2-ep2-etp1").sizes["etp"] == 1
    for text in ("tp", "2", "tp0", "xp2", "tp2,dp2", ""):
        with pytest.raises(ConfigError, match="is no size, expected some of tp, cp"):
            Layout.parse(text)


def test_config_of_a_run_on_gpus_is_laid_out_on_this_cpu_with_both_roles_alike(folder: str) -> None:
    one = config_of(
        dump(folder, None, batch__use_dynamic_batch_size=True, batch__max_tokens_per_gpu=99),
        Path("d/x.npz"),
        {"actor": Start.of(folder)},
    )
    found: Config = replay.checked(one, Layout.parse("tp2-dp2-mbs1"), ["actor", "critic"])
    assert found.role("actor").layout == found.role("critic").layout
    assert found.role("actor").num_ranks == 4 and found.role("critic").lr == 0.5
    assert found.cluster.device == "cpu" and not found.generates
    assert (found.batch.micro_batch_size, found.batch.use_dynamic_batch_size) == (1, False)
    assert laid_out(one, Layout.parse("1")).batch.max_tokens_per_gpu == 99
    with pytest.raises(ConfigError, match=r"layout dp3: --global-batch-size 4 is not a multiple of the 3 data-parallel ranks"):
        replay.checked(one, Layout.parse("dp3"), ["actor"])
    with pytest.raises(ConfigError, match=r"layout tp4: .*4 of the actor does not divide the 2 key-value heads"):
        replay.checked(one, Layout.parse("tp4"), ["actor"])


@pytest.mark.parametrize(
    ("metric", "weight", "agrees"), [(0, 0, True), (1e-3, 0, True), (3e-3, 0, False), (0, 0.09, True), (0, 0.11, False)]
)
def test_replay_agrees_within_the_tolerances_of_metrics_and_of_weights(
    monkeypatch: pytest.MonkeyPatch, folder: str, metric: float, weight: float, agrees: bool
) -> None:
    """A loss of 2, and two steps of the actor, whose largest learning rate is 1/3."""
    pool = Pool(metric, 2 * weight / 3)
    assert compare(monkeypatch, folder, pool).agrees(Tolerance(1e-3, 0.1)) is agrees
    assert pool.worlds == [1, 4]


def test_replay_prints_a_row_per_step_and_whether_the_weights_fit(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    lines = compare(monkeypatch, folder, Pool(metric=1e-3)).text().splitlines()
    assert lines[0] == "actor: old log-probs before the first step differ from the file's by at most 0.0e+00"
    assert lines[1].endswith("at most 2.0e-01: these are not the weights that the rollout started from")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert ["actor", "tp2-dp2", "0", "2.001000", "1.000000", "5.0e-04", ""] in cells
    assert ["critic", "tp2-dp2", "1", "skipped", "skipped", "0.0e+00", "0.0e+00"] in cells
    assert len(cells) == 8


def test_step_error_of_other_metrics_or_nan_is_infinite() -> None:
    assert step_error({"a": 0.01}, {"a": 0.0}) == pytest.approx(0.1)
    assert step_error({"a": 1.0}, {"b": 1.0}) == step_error({"a": float("nan")}, {"a": 1.0}) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to replay: give --weights, --critic-weights, or both"),
        (("--weights", "nowhere"), "nowhere: no such folder"),
        (("--weights", "{folder}", "--with-optimizer"), "--with-optimizer needs torch_dist checkpoints"),
        (("--weights", "{folder}", "--layouts", "1", "tp3"), "layout tp3: --tensor-model-parallel-size 3 of the actor does not"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    write_dump(tmp_path / "x.npz", dump(folder, make_training(plain_samples())))
    assert replay_step.main([str(tmp_path / "x.npz"), *(one.format(folder=folder) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_files_that_cannot_be_replayed_say_why(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path / "x.npz", dump(folder, None))
    assert replay_step.main([str(tmp_path / "x.npz"), "--weights", folder]) == 2
    assert "the file holds samples only" in capsys.readouterr().err
    training = make_training(plain_samples())
    critic_only = replace(training, learning_rates={"critic": training.learning_rates["critic"]})
    write_dump(tmp_path / "x.npz", dump(folder, critic_only))
    assert replay_step.main([str(tmp_path / "x.npz"), "--weights", folder]) == 2
    assert "the run did not train the actor in rollout 3" in capsys.readouterr().err


def test_dry_run_says_what_would_run_and_starts_no_rank(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path / "x.npz", dump(folder, make_training(plain_samples())))
    arguments = ("--weights", folder, "--layouts", "1", "dp2", "--num-steps", "3", "--dtype", "bfloat16", "--dry-run")
    assert replay_step.main([str(tmp_path / "x.npz"), *arguments]) == 0
    assert capsys.readouterr().out == "rollout 3: 3 steps of actor in bfloat16\nlayouts: 1 on 1 rank, dp2 on 2 ranks\n"
