"""What a run reads before it starts anything."""

import json
from pathlib import Path

import pytest

from slime_ppo.config.fields import Value
from slime_ppo.errors import ConfigError
from slime_ppo.launch import RunInputs, read_inputs
from tests.helpers.configs import make_config
from tests.helpers.reward_services import Respond, reward_service
from tests.helpers.tiny_llama import make_tiny_llama


def inputs_with(respond: Respond, home: Path, **values: Value) -> RunInputs:
    folder = make_tiny_llama(home / "policy", max_position=2048)
    (home / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 8, encoding="utf-8")
    with reward_service(respond) as service:
        config = make_config(
            model__hf_checkpoint=str(folder),
            data__prompt_data=str(home / "prompts.jsonl"),
            run__save=str(home / "run"),
            reward__rm_url=service.url,
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
