"""Options of rewards that ask a server."""

import pytest

from slime_ppo.config.checks import check_config, config_warnings
from slime_ppo.config.fields import Value
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config

Values = dict[str, Value]
REMOTE: Values = {"reward__rm_type": "remote", "reward__rm_url": "http://127.0.0.1:8000/score?version=2"}
MODEL: Values = {"reward__rm_type": "reward_model", "reward__rm_url": "https://[::1]:30000/"}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"reward__rm_type": "math"}, ("--rm-type math compares answers with labels, but --label-key not set. Name the key",)),
        ({"reward__rm_type": "remote"}, ("--rm-type remote needs the address", "as in http://127.0.0.1:30000/score")),
        ({"reward__rm_type": "reward_model"}, ("--rm-type reward_model needs the address", "as in http://127.0.0.1:30000")),
        ({**REMOTE, "reward__rm_url": "127.0.0.1:8000"}, ("--rm-url 127.0.0.1:8000 is no HTTP address", "http://host:port")),
        ({**REMOTE, "reward__rm_url": "ftp://host/score"}, ("is no HTTP address",)),
        ({**REMOTE, "reward__rm_url": "http://:8000/score"}, ("is no HTTP address",)),
        ({**REMOTE, "reward__rm_url": "http://host:port/score"}, ("cannot be read",)),
        ({**REMOTE, "reward__rm_url": "http://host:99999/score"}, ("cannot be read",)),
        ({**REMOTE, "reward__rm_url": "http://host:80/my score"}, ("holds a space",)),
        ({**REMOTE, "reward__rm_url": "http://host:80/score#now"}, ("holds a #",)),
        ({**REMOTE, "reward__rm_url": "http://me:secret@host:80/score"}, ("holds a user name or password", "--rm-api-key-file")),
        ({**MODEL, "reward__rm_url": "http://host:80/classify"}, ("goes on behind the address", "SGLang server alone")),
        ({**MODEL, "reward__rm_url": "http://host:80?x=1"}, ("goes on behind the address",)),
        (
            {**REMOTE, "reward__rm_timeout_s": 28.0},
            (
                "--rm-timeout-s 28.0 is longer than the 27 s that requests have in a reward call of --reward-timeout-s 30.0",
                "Use --rm-timeout-s 27 or less, or --reward-timeout-s 31.1111 or more",
            ),
        ),
    ],
)
def test_reward_that_cannot_be_asked_is_refused(values: Values, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(make_config(**values))
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"reward__rm_type": "math", "data__label_key": "answer"},
        {"reward__rm_type": "math", "reward__custom_rm_path": "my.score"},
        {**REMOTE, "reward__rm_timeout_s": 27.0, "reward__rm_concurrency": 4, "reward__rm_max_attempts": 1},
        {**MODEL, "reward__rm_input": "text", "reward__rm_api_key_file": "key"},
    ],
)
def test_reward_options_in_use_pass_without_a_warning(values: Values) -> None:
    check_config(make_config(**values))
    assert config_warnings(make_config(**values)) == ()


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (
            {"reward__rm_url": "http://host:80"},
            "--rm-url http://host:80 has no effect: it is used only with --rm-type remote or rew",
        ),
        ({**REMOTE, "reward__custom_rm_path": "my.score"}, "and no --custom-rm-path"),
        ({"reward__rm_timeout_s": 5.0}, "--rm-timeout-s 5.0 has no effect"),
        ({"reward__rm_max_attempts": 5}, "--rm-max-attempts 5 has no effect"),
        ({"reward__rm_api_key_file": "key"}, "--rm-api-key-file key has no effect"),
        ({**MODEL, "reward__rm_concurrency": 5}, "--rm-concurrency 5 has no effect: it is used only with --rm-type remote"),
        ({**REMOTE, "reward__rm_input": "text"}, "--rm-input text has no effect: it is used only with --rm-type reward_model"),
    ],
)
def test_reward_options_that_nothing_uses_are_warned_of(values: Values, part: str) -> None:
    check_config(make_config(**values))
    [warning] = config_warnings(make_config(**values))
    assert part in warning


def test_reward_requests_end_before_the_call_is_killed() -> None:
    reward = make_config(**REMOTE, reward__reward_timeout_s=10.0).reward
    assert (reward.requests_s, reward.request_timeout_s) == (9.0, 9.0)
    assert make_config(**REMOTE, reward__rm_timeout_s=2.0).reward.request_timeout_s == 2.0


def test_reward_that_takes_too_long_counts_as_zero_with_math_and_as_a_bad_sample_otherwise() -> None:
    def policy(**values: Value) -> str:
        return make_config(**values).reward.timeout_policy

    assert (policy(), policy(reward__rm_type="math"), policy(reward__on_bad_sample="drop")) == ("error", "zero", "drop")
    assert policy(reward__rm_type="math", reward__custom_rm_path="my.score") == "error"
    assert policy(reward__rm_type="math", reward__on_reward_timeout="drop") == "drop"
