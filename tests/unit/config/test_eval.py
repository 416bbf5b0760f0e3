"""Section eval: the list of data sets, and what is refused or warned of."""

from pathlib import Path

import pytest

from slime_ppo.config.checks import check_config, check_engine_support, config_warnings
from slime_ppo.config.eval import EvalConfig
from slime_ppo.config.fields import Value
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config

SETS: dict[str, Value] = {"eval__eval_interval": 1, "eval__eval_prompt_data": "held_out.jsonl"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("held out/a,b.jsonl", {"heldout": "held out/a,b.jsonl"}),
        ("math=m.jsonl", {"math": "m.jsonl"}),
        ("math=m.jsonl, code-2.v1_x = runs/lr=1/c.jsonl", {"math": "m.jsonl", "code-2.v1_x": "runs/lr=1/c.jsonl"}),
    ],
)
def test_data_sets_of_a_path_or_a_list(text: str | None, expected: dict[str, str]) -> None:
    assert list(EvalConfig(eval_prompt_data=text).data_sets.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math=m.jsonl,code.jsonl", "the entry 'code.jsonl' is not name=path; several data sets are written name=path,name2=path2"),
        ("math=m.jsonl,", "the entry '' is not name=path"),
        ("math=", "the entry 'math=' is not name=path"),
        ("=m.jsonl", "the data set name '' is to be letters"),
        ("runs/lr=1/c.jsonl", "the data set name 'runs/lr' is to be .* one path with '=' in it is written heldout=path"),
        ("a b=m.jsonl", "the data set name 'a b'"),
        ("-a=m.jsonl", "the data set name '-a'"),
        ("math=m.jsonl,math=n.jsonl", "the data set name 'math' is there twice, for m.jsonl and n.jsonl"),
        ("math_response_len=m.jsonl", "'math_response_len' ends like a metric of a data set"),
        ("math_truncated_ratio=m.jsonl", "ends like a metric"),
    ],
)
def test_data_sets_broken_list_is_refused_with_flag_and_reason(text: str, message: str) -> None:
    for interval in (0, 1):
        with pytest.raises(ConfigError, match=f"^--eval-prompt-data .*: .*{message}"):
            check_config(make_config(eval__eval_prompt_data=text, eval__eval_interval=interval))


def test_several_greedy_answers_are_refused_and_sampled_ones_are_not() -> None:
    with pytest.raises(
        ConfigError, match="--eval-n-samples-per-prompt 4 with --eval-temperature 0.0: greedy answers .* all the same"
    ):
        check_config(make_config(**SETS, eval__eval_n_samples_per_prompt=4))
    check_config(make_config(**SETS, eval__eval_n_samples_per_prompt=4, eval__eval_temperature=0.6))


@pytest.mark.parametrize(
    ("values", "name"),
    [({"eval_top_p": 0.9}, "eval_top_p"), ({"eval_top_k": 5}, "eval_top_k"), ({"eval_min_p": 0.1}, "eval_min_p")],
)
def test_restrictions_need_a_sampler_that_is_not_greedy_and_an_engine_with_supports(values: dict[str, float], name: str) -> None:
    keys: dict[str, Value] = {f"eval__{key}": value for key, value in values.items()}
    sampled = make_config(**SETS, **keys, eval__eval_temperature=1.0)
    assert sampled.eval.restrictions == (name,)
    assert config_warnings(sampled) == ()
    check_engine_support(sampled, returns_support=True)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*does not return the support"):
        check_engine_support(sampled, returns_support=False)
    greedy = make_config(**SETS, **keys)
    check_engine_support(greedy, returns_support=False)
    [warning] = config_warnings(greedy)
    assert f"--{name.replace('_', '-')}" in warning and "--eval-temperature above 0" in warning


def test_evaluation_options_without_an_evaluation_are_warned_of() -> None:
    [data, temperature] = config_warnings(make_config(eval__eval_prompt_data=str(Path("a.jsonl")), eval__eval_temperature=0.5))
    assert "--eval-prompt-data a.jsonl has no effect" in data and "--eval-interval above 0" in data
    assert "--eval-temperature 0.5 has no effect" in temperature


def test_pass_threshold_is_used_only_with_several_answers() -> None:
    [warning] = config_warnings(make_config(reward__pass_threshold=0.5))
    assert "--pass-threshold 0.5 has no effect" in warning
    assert config_warnings(make_config(reward__pass_threshold=0.5, rollout__n_samples_per_prompt=2)) == ()
    sampled: dict[str, Value] = {"eval__eval_n_samples_per_prompt": 2, "eval__eval_temperature": 1.0}
    assert config_warnings(make_config(**SETS, **sampled, reward__pass_threshold=0.5)) == ()
