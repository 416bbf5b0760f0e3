import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_ppo.config.reward import RewardConfig
from slime_ppo.errors import ConfigError
from slime_ppo.rewards.base import RewardSpec
from slime_ppo.rewards.resolve import resolve_reward
from slime_ppo.rewards.worker import import_problem
from tests.helpers.reward_services import reward_service

REMOTE = "slime_ppo.rewards.remote.RemoteReward"


def resolved(rm_type: str | None, custom_rm_path: str | None = None) -> RewardSpec:
    return resolve_reward(RewardConfig(rm_type=rm_type, custom_rm_path=custom_rm_path), policy_folder="model")


def test_resolve_name_gives_its_dotted_path() -> None:
    assert resolved("vader") == RewardSpec("slime_ppo.rewards.vader.VaderReward", "--rm-type vader")


def test_resolve_custom_path_wins_over_the_name() -> None:
    assert resolved("remote", "my_rewards.score") == RewardSpec("my_rewards.score", "--custom-rm-path")


def test_resolve_unknown_name_lists_known_and_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match="--rm-type: no reward function is called 'vaader'; did you mean 'vader'\\? Known: math, remote, reward_model, vader",
    ):
        resolved("vaader")


def test_resolve_file_name_instead_of_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="--custom-rm-path: 'rewards/mine.py' is no dotted path"):
        resolved(None, "rewards/mine.py")


def test_resolve_neither_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"no reward function: give --rm-type \(math, remote, reward_model, vader\), or --custom-rm-path"
    ):
        resolved(None)


def test_resolve_remote_hands_its_options_to_the_class_which_builds(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret", encoding="utf-8")
    with reward_service(lambda path, body: (200, "1")) as service:
        url = f"{service.url}/score"
        given = RewardConfig(rm_type="remote", rm_url=url, reward_timeout_s=20.0, rm_concurrency=5, rm_api_key_file=str(key))
        spec = resolve_reward(given, policy_folder="model")
        assert service.asked == []
    assert (spec.path, spec.origin, spec.warnings) == (REMOTE, "--rm-type remote", ())
    assert dict(spec.arguments) == {
        "url": url, "api_key_file": str(key), "timeout_s": 18.0, "requests_s": 18.0, "max_attempts": 3, "concurrency": 5,
    }  # fmt: skip
    assert import_problem(spec) == ""


def test_resolve_remote_without_a_server_is_refused_before_the_run() -> None:
    with reward_service(lambda path, body: (200, "1")) as service:
        url = f"{service.url}/score"
    with pytest.raises(ConfigError, match=r"--rm-url http://.*/score: nobody answers at 127.0.0.1:\d+ .*Start the reward server"):
        resolve_reward(RewardConfig(rm_type="remote", rm_url=url), policy_folder="model")


def test_resolve_reward_model_hands_on_what_its_server_told() -> None:
    answers = {
        "/model_info": {"is_generation": False, "model_path": "/elsewhere/rm", "tokenizer_path": "/elsewhere/rm"},
        "/server_info": {"max_req_input_len": 120},
        "/classify": [{"embedding": [0.5], "meta_info": {"prompt_tokens": 2}}],
    }
    with reward_service(lambda path, body: (200, json.dumps(answers[path]))) as service:
        spec = resolve_reward(RewardConfig(rm_type="reward_model", rm_url=service.url), policy_folder="model")
    assert dict(spec.arguments) == {
        "url": service.url, "api_key_file": None, "timeout_s": 27.0, "requests_s": 27.0, "max_attempts": 3, "sends": "ids",
        "max_tokens": 124, "vocab_size": None,
    }  # fmt: skip
    assert len(spec.warnings) == 2
    assert import_problem(spec) == ""


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe"])
def test_resolve_key_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    reward = RewardConfig(rm_type="remote", rm_url="http://127.0.0.1:1", rm_api_key_file=str(key))
    with pytest.raises(ConfigError, match=f"--rm-api-key-file {key} .* Name a text file that holds the key alone"):
        resolve_reward(reward, policy_folder="model")


def test_driver_modules_import_no_torch_and_none_of_the_workers_client() -> None:
    modules = "data.schedule, slime_ppo.data.source, slime_ppo.data.tokenizer, slime_ppo.rewards.runner, slime_ppo.rewards.resolve"
    unwanted = "{'torch', 'ray', 'transformers', 'megatron', 'sglang', 'aiohttp'}"
    code = f"import slime_ppo.{modules}, sys; sys.exit(str({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "set()"
