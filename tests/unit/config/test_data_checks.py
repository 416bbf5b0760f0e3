"""How prompts are named and rendered, before anything is read."""

import pytest

from slime_ppo.config.checks import check_config, config_warnings
from slime_ppo.config.fields import Value
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config

Values = dict[str, Value]
EVAL: Values = {"eval__eval_interval": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data__prompt_data": "p.jsonl@[1]"}, "--prompt-data p.jsonl@[1]: 'p.jsonl@[1]' is no path@[start:end]"),
        ({**EVAL, "eval__eval_prompt_data": "a=p.jsonl,b=q.jsonl@[:x]"}, "'q.jsonl@[:x]' is no path@[start:end]"),
        ({"data__apply_chat_template_kwargs": "thinking=1"}, "--apply-chat-template-kwargs thinking=1: no JSON, "),
        ({"data__apply_chat_template_kwargs": "[1]"}, '[1]: a JSON list, expected an object. Write it as in \'{"enable_thinking"'),
        ({"data__apply_chat_template_kwargs": '{"tools": []}'}, "'tools' comes from the prompt file and cannot be set"),
    ],
)
def test_data_that_cannot_be_is_refused(values: Values, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(make_config(**values))
    assert message in str(error.value)


def test_data_slices_and_template_variables_pass() -> None:
    config = make_config(
        data__prompt_data="p.parquet@[:100]", **EVAL, eval__eval_prompt_data="a=p.parquet@[100:]",
        data__apply_chat_template=True, data__apply_chat_template_kwargs='{"enable_thinking": false}',
    )  # fmt: skip
    check_config(config)
    assert config_warnings(config) == ()
    assert config.data.template_variables == {"enable_thinking": False}
    assert make_config().data.template_variables == {}


@pytest.mark.parametrize("values", [{"chat_template": "t.jinja"}, {"tool_key": "tools"}, {"apply_chat_template_kwargs": "{}"}])
def test_data_options_of_a_template_that_is_not_applied_are_warned_of(values: Values) -> None:
    [warning] = config_warnings(make_config(**{f"data__{name}": value for name, value in values.items()}))
    assert "has no effect: it is used only with --apply-chat-template" in warning
