"""What the launcher does to a run folder, and what it starts the roles with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_ppo.config.fields import Value
from slime_ppo.config.roles import RoleName
from slime_ppo.errors import ConfigError
from slime_ppo.launch import RunInputs, _claim_run_folder, read_inputs
from slime_ppo.orchestration.ray_launcher import _start_role
from slime_ppo.orchestration.worker_settings import worker_settings
from tests.helpers.configs import make_config
from tests.helpers.reward_services import Respond, reward_service
from tests.helpers.tiny_llama import make_tiny_llama


def test_claim_run_folder_removes_old_records_and_keeps_weights_and_other_files(tmp_path: Path) -> None:
    records = ("metrics.jsonl", "samples.jsonl", "run.json", "report.html")
    kept = ("hf/model.safetensors", "critic/model.safetensors", "tensorboard/events", "notes.txt")
    for name in (*records, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    _claim_run_folder(make_config(run__save=str(tmp_path), run__seed=7))
    assert not any((tmp_path / name).exists() for name in records)
    assert all((tmp_path / name).read_text() == "old" for name in kept)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["seed"] == 7


def test_claim_run_folder_with_tensorboard_removes_old_events(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    _claim_run_folder(make_config(run__save=str(tmp_path), tracking__use_tensorboard=True))
    assert not (tmp_path / "tensorboard").exists()


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
    left_out = "1 prompts of more than 8 tokens left out"
    assert inputs.left_out == (f"{paths['math']}: {left_out}", f"{paths['code']}: {left_out}")


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
