"""The questions that the driver asks a reward server at the start. The server is one of ours that answers as SGLang does."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.rewards.classifier_folder import link_with_zero_bias
from slime_ppo.rewards.reward_server import RewardServer, inspect_reward_server
from tests.helpers.reward_services import Respond, reward_service
from tests.helpers.tiny_classifier import make_tiny_classifier
from tests.helpers.tiny_llama import make_tiny_llama

Sends = Literal["ids", "text"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier as transformers saves it, without the bias."""
    return make_tiny_classifier(tmp_path_factory.mktemp("rm") / "saved")


@pytest.fixture(scope="module")
def whole(saved: Path) -> Path:
    target = saved.with_name("whole")
    target.mkdir()
    link_with_zero_bias(saved, target)
    return target


def sglang_answers(model: Path | str, **changes: object) -> Respond:
    """The answers of a server of `model`; a change is an answer to /path, under the path's name."""
    answers: dict[str, Any] = {
        "model_info": {"model_path": str(model), "tokenizer_path": str(model), "is_generation": False},
        "server_info": {"max_req_input_len": 122},
    }

    def respond(path: str, body: Any) -> tuple[int, str]:
        name = path.strip("/")
        if name in changes:
            return 200, json.dumps(changes[name])
        if name == "classify":
            num = len(body["input_ids"][0]) if "input_ids" in body else 1
            return 200, json.dumps([{"embedding": [0.5], "meta_info": {"prompt_tokens": num}}])
        return 200, json.dumps(answers[name])

    return respond


def inspected(respond: Respond, policy: Path, *, sends: Sends = "ids", api_key: str | None = None) -> RewardServer:
    with reward_service(respond) as service:
        return inspect_reward_server(service.url, api_key=api_key, sends=sends, policy_folder=str(policy))


@pytest.mark.parametrize("sends", ["ids", "text"])
def test_inspect_whole_server_tells_its_limits_without_a_warning(whole: Path, saved: Path, sends: Sends) -> None:
    assert inspected(sglang_answers(whole), saved, sends=sends) == RewardServer(max_tokens=126, vocab_size=100, warnings=())


def test_inspect_folder_without_bias_is_refused_with_the_command_that_helps(saved: Path) -> None:
    with pytest.raises(ConfigError) as error:
        inspected(sglang_answers(saved), saved)
    text = str(error.value)
    assert f"serves {saved} with a random bias: its folder holds no score.bias" in text
    assert text.endswith(f"python scripts/serve_reward_model.py {saved}")


@pytest.mark.parametrize("folder", ["/not/here", "relative/folder"])
def test_inspect_folder_that_cannot_be_read_is_a_warning(saved: Path, folder: str) -> None:
    server = inspected(sglang_answers(folder), saved)
    bias, tokenizer = server.warnings
    assert f"its model folder {folder} cannot be read from here" in bias and "scripts/serve_reward_model.py" in bias
    assert f"its tokenizer {folder}/tokenizer.json cannot be read" in tokenizer and "use --rm-input text" in tokenizer
    assert server.vocab_size is None
    assert len(inspected(sglang_answers(folder), saved, sends="text").warnings) == 1


def test_inspect_relative_folder_is_not_looked_for_here(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from where the server was started."""
    monkeypatch.chdir(saved.parent)
    assert len(inspected(sglang_answers(saved.name), saved).warnings) == 2


def test_inspect_other_tokenizer_is_refused_for_ids_and_fine_for_text(whole: Path, tmp_path: Path) -> None:
    policy = make_tiny_llama(tmp_path / "policy", vocab_size=102)
    text = (policy / "tokenizer.json").read_text(encoding="utf-8")
    (policy / "tokenizer.json").write_text(text.replace('"b": 6', '"b": 7').replace('"c": 7', '"c": 6'), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        inspected(sglang_answers(whole), policy)
    assert f"the tokenizer of {whole} is not the policy's: 4 of 102 tokens differ, token 6 is 'b' there and 'c' in {policy}" in str(
        error.value
    )
    assert str(error.value).endswith("Use --rm-input text")
    assert inspected(sglang_answers(whole), policy, sends="text").warnings == ()


def test_inspect_policy_with_fewer_tokens_is_fine(whole: Path, tmp_path: Path) -> None:
    """What matters is that every id of the policy means the same to the reward model."""
    assert inspected(sglang_answers(whole), make_tiny_llama(tmp_path / "policy", vocab_size=90)).warnings == ()


@pytest.mark.parametrize(
    ("name", "answer", "problem"),
    [
        ("model_info", {"is_generation": True, "model_path": "m", "tokenizer_path": "m"}, "the server generates text"),
        ("model_info", {"hello": "world"}, "the server generates text (is_generation None)"),
        ("model_info", [1], "/model_info answered [1], expected an SGLang server"),
        ("server_info", {"version": "0.1"}, "/server_info tells max_req_input_len None, expected a number"),
        (
            "classify",
            [{"embedding": [0.5, 0.25], "meta_info": {"prompt_tokens": 2}}],
            "expected one label: a model with num_labels 1",
        ),
    ],
)
def test_inspect_server_of_another_kind_is_refused(whole: Path, saved: Path, name: str, answer: object, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        inspected(sglang_answers(whole, **{name: answer}), saved)
    assert "--rm-url http://127.0.0.1:" in str(error.value) and problem in str(error.value)


def test_inspect_sends_the_key_and_says_when_it_is_refused(whole: Path, saved: Path) -> None:
    with reward_service(sglang_answers(whole)) as service:
        inspect_reward_server(service.url, api_key="secret", sends="ids", policy_folder=str(saved))
    assert {key for _, _, key in service.asked} == {"Bearer secret"}
    with pytest.raises(ConfigError, match=r"/model_info answered status 401: denied\. The key is wrong or missing"):
        inspected(lambda path, body: (401, "denied"), saved)


def test_inspect_redirect_is_not_followed_with_the_key(whole: Path, saved: Path) -> None:
    with reward_service(sglang_answers(whole)) as other, pytest.raises(ConfigError, match="answered status 302"):
        inspected(lambda path, body: (302, f"{other.url}{path}"), saved, api_key="secret")
    assert other.asked == []


def test_inspect_answer_that_is_no_json_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"/model_info cannot be read as JSON .*Expected an SGLang server"):
        inspected(lambda path, body: (200, "<html>"), saved)


def test_inspect_nobody_there_is_refused(saved: Path) -> None:
    with reward_service(lambda path, body: (200, "1")) as service:
        pass
    with pytest.raises(ConfigError, match=r"nobody answers at 127.0.0.1:\d+"):
        inspect_reward_server(service.url, api_key=None, sends="ids", policy_folder=str(saved))
