"""What the launcher does to a run folder, and what it starts the roles with."""

import errno
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_ppo.checkpoint.run_state import Checkpoint, RunState
from slime_ppo.checkpoint.start import StartPoint, beginning
from slime_ppo.config.fields import Value
from slime_ppo.config.roles import ROLE_NAMES, RoleName
from slime_ppo.errors import CheckpointError, ConfigError
from slime_ppo.inputs import RunInputs, read_inputs
from slime_ppo.launch import _load
from slime_ppo.orchestration.ray_launcher import _start_role
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.orchestration.worker_settings import worker_settings
from slime_ppo.run_folder import claim_run_folder, open_logs, way_on
from tests.helpers.configs import make_config
from tests.helpers.reward_services import Respond, reward_service
from tests.helpers.tiny_llama import make_tiny_llama
from tests.helpers.trainer_parts import RecordingRole


def test_claim_run_folder_removes_old_records_and_keeps_weights_and_other_files(tmp_path: Path) -> None:
    records = ("metrics.jsonl", "samples.jsonl", "run.json", "report.html", "run_state.json")
    kept = ("hf/model.safetensors", "critic/model.safetensors", "tensorboard/events", "notes.txt")
    for name in (*records, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    config = make_config(run__save=str(tmp_path), run__seed=7)
    claim_run_folder(config, beginning(config, {}))
    assert not any((tmp_path / name).exists() for name in records)
    assert all((tmp_path / name).read_text() == "old" for name in kept)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["seed"] == 7


def test_claim_run_folder_with_tensorboard_removes_old_events(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    config = make_config(run__save=str(tmp_path), tracking__use_tensorboard=True)
    claim_run_folder(config, beginning(config, {}))
    assert not (tmp_path / "tensorboard").exists()


def test_way_on_names_the_newest_checkpoint_of_this_run_alone(tmp_path: Path) -> None:
    config = make_config(run__save=str(tmp_path))
    start, other = beginning(config, {}), beginning(config, {})
    nothing = f"the run folder is {tmp_path}"
    assert (way_on(config, None), way_on(config, start)) == ("the run had not begun", nothing)
    saved = (Checkpoint(2, {}, "state_2.json", "", None), Checkpoint(4, {}, "state_4.json", "", None))
    replace(start.run_state, checkpoints=saved).write(tmp_path)
    assert way_on(config, start) == f"saved after 4 rollouts: go on with --load {tmp_path} --save {tmp_path}"
    assert way_on(config, other) == nothing, "an earlier run's checkpoints are not this one's"
    (tmp_path / "run_state.json").write_text("{")
    assert way_on(config, start) == nothing


def records_of_a_run(folder: Path, num_rollouts: int) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder / name).write_text("".join(f'{{"rollout_id": {number}}}\n' for number in range(num_rollouts)))


def test_claim_run_folder_of_a_run_that_goes_on_keeps_its_records_and_gives_up_later_checkpoints(tmp_path: Path) -> None:
    records_of_a_run(tmp_path, 7)
    (tmp_path / "tensorboard").mkdir()
    config = make_config(run__save=str(tmp_path), checkpoint__load=str(tmp_path), tracking__use_tensorboard=True)
    state = RunState("run", (Checkpoint(4, {"actor": "actor/iter_0000004"}, "rollout/state_0000004.json", "0"),))
    begun = beginning(config, {})
    claim_run_folder(config, replace(begun, resumed=True, records=tmp_path, run_state=state))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7  # the trackers cut them
    assert (tmp_path / "tensorboard").exists()
    assert RunState.read(tmp_path) == state


def test_claim_run_folder_of_a_run_that_goes_on_elsewhere_takes_the_records_along(tmp_path: Path) -> None:
    records_of_a_run(tmp_path / "old", 7)
    records_of_a_run(tmp_path / "new", 2)
    config = make_config(run__save=str(tmp_path / "new"), checkpoint__load=str(tmp_path / "old"))
    claim_run_folder(config, replace(beginning(config, {}), resumed=True, records=tmp_path / "old"))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "new" / name).read_text() == (tmp_path / "old" / name).read_text()
    assert RunState.read(tmp_path / "new") is None


def test_claim_run_folder_on_a_full_disk_keeps_the_config_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        claim_run_folder(make_config(run__save=str(tmp_path)), beginning(make_config(), {}))
    assert (tmp_path / "config.yaml").read_text() == "old"


def test_open_logs_keeps_the_log_of_the_run_before(tmp_path: Path) -> None:
    package, log = logging.getLogger("slime_ppo"), tmp_path / "logs" / "driver.log"
    before = package.handlers, package.level, package.propagate
    try:
        for values in ({}, {"run__overwrite": True}, {"checkpoint__load": str(tmp_path)}):
            open_logs(make_config(run__save=str(tmp_path), **values))
    finally:
        package.handlers, package.level, package.propagate = before
    assert [line.split(" ", 3)[3] for line in log.read_text().splitlines()] == [f"process {os.getpid()} starts a run"] * 3


def loading(start: StartPoint) -> tuple[list[str], list[str]]:
    """What is said, and what the roles are asked to do."""
    journal: list[str] = []
    groups: dict[RoleName, Any] = {role: RecordingRole(role, journal) for role in ROLE_NAMES}
    turns = DeviceTurns(groups, offload=True, on_time=lambda name, seconds: None)
    return _load(start, groups, turns), journal


def test_load_of_a_resumed_run_wakes_each_role_and_says_what_came_back() -> None:
    folders: dict[RoleName, Path] = {"actor": Path("run/actor/iter_0000004"), "critic": Path("run/critic/iter_0000004")}
    start = replace(beginning(make_config(), {}), text="resumed", resumed=True, folders=folders, changes=("--lr was 1, is 2",))
    said, journal = loading(start)
    assert journal == [
        *("wake actor", "load actor from iter_0000004 with its optimizer"),
        *("offload actor", "wake critic", "load critic from iter_0000004 with its optimizer"),
    ]
    assert said[0].startswith("resumed: weights and optimizer of actor and critic") and said[1:] == ["--lr was 1, is 2"]


def test_load_of_weights_leaves_the_optimizer_and_the_critic() -> None:
    start = replace(beginning(make_config(), {}), text="weights only", folders={"actor": Path("td/iter_0000000")})
    assert loading(start) == (["weights only"], ["wake actor", "load actor from iter_0000000"])
    assert loading(beginning(make_config(), {})) == ([], [])


@pytest.mark.parametrize("gone", [False, True])
def test_load_of_a_checkpoint_that_a_live_run_has_deleted_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("it has no .metadata")

    monkeypatch.setattr(RecordingRole, "load_checkpoint", fail)
    folder = tmp_path / "run" / ("gone" if gone else "")
    (tmp_path / "run").mkdir()
    with pytest.raises(
        CheckpointError, match="gone has gone since .* higher --keep-checkpoints" if gone else "^it has no .metadata"
    ):
        loading(replace(beginning(make_config(), {}), text="resumed", resumed=True, folders={"actor": folder}))


class RecordingGroup:
    def __init__(self, role: str) -> None:
        self.role = role
        self.started: list[tuple[str, list[Sequence[object]]]] = []

    def start(self, method: str, arguments: Sequence[Sequence[object]]) -> list[object]:
        self.started.append((method, list(arguments)))
        return []


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_start_role_gives_each_rank_the_sections_that_its_role_reads(role: RoleName) -> None:
    config = make_config(parallel__actor_num_gpus_per_node=2, correction__mode="tis", rollout__rollout_temperature=0.7)
    ranks = worker_settings(config, role, init_method="tcp://here", device="cpu")
    group: Any = RecordingGroup(role)
    assert _start_role(config, group, ranks) == []
    read = (config.ppo, config.correction, 0.7) if role == "actor" else (config.ppo,)
    assert group.started == [(f"start_{role}", [(rank, *read) for rank in ranks])]


def test_read_inputs_reads_every_evaluation_file_and_tells_what_each_has_left_out(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model", seed=0)
    long = "a very long prompt " * 20
    files = {"train": ["a"], "math": ["b", long, "c"], "code": [long, "d"]}
    for name, texts in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in files}
    config = make_config(
        model__hf_checkpoint=str(folder), run__save=str(tmp_path / "run"), data__prompt_data=paths["train"],
        data__rollout_max_prompt_len=8, data__overlong_prompt="drop", eval__eval_interval=1,
        eval__eval_prompt_data=f"math={paths['math']},code={paths['code']}", critic__init_value_head="zeros",
    )  # fmt: skip
    inputs = read_inputs(config, returns_support=True)
    assert [(one.name, [p.text for p in one.prompts]) for one in inputs.eval_sets] == [("math", ["b", "c"]), ("code", ["d"])]
    left_out, rows = "1 prompts of more than 8 tokens left out, the first:", {"math": 2, "code": 1}
    found = [line.rpartition(": prompt of ")[0] for line in inputs.left_out]
    assert found == [f"{paths[name]}: {left_out} {paths[name]}:{row}" for name, row in rows.items()]


def inputs_with(respond: Respond, home: Path, **values: Value) -> RunInputs:
    folder = make_tiny_llama(home / "policy", max_position=2048)
    (home / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 8, encoding="utf-8")
    with reward_service(respond) as service:
        config = make_config(
            model__hf_checkpoint=str(folder),
            data__prompt_data=str(home / "prompts.jsonl"),
            run__save=str(home / "run"),
            reward__rm_url=service.url,
            critic__init_value_head="zeros",
            **values,
        )
        return read_inputs(config, returns_support=True)


def test_read_inputs_asks_the_reward_server_and_keeps_what_it_could_not_check(tmp_path: Path) -> None:
    answers = {
        "/model_info": {"is_generation": False, "model_path": "/elsewhere", "tokenizer_path": "/elsewhere"},
        "/server_info": {"max_req_input_len": 2048},
        "/classify": [{"embedding": [0.5], "meta_info": {"prompt_tokens": 2}}],
    }
    inputs = inputs_with(lambda path, body: (200, json.dumps(answers[path])), tmp_path, reward__rm_type="reward_model")
    assert [warning.split(" cannot be read")[0].split(": ")[1] for warning in inputs.reward_warnings] == [
        "its model folder /elsewhere",
        "its tokenizer /elsewhere/tokenizer.json",
    ]
    assert not (tmp_path / "run").exists()


def test_read_inputs_reward_server_of_another_kind_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/model_info answered status 404: not here"):
        inputs_with(lambda path, body: (404, "not here"), tmp_path, reward__rm_type="reward_model")
