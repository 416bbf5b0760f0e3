"""How prompts are named and rendered: what one option's bounds cannot say."""

from slime_ppo.config.checked import Checked
from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.errors import ConfigError


def check_data(checked: Checked) -> None:
    """Refuse a slice of a prompt file that cannot be read, and variables that no chat template can get. Raises ConfigError."""
    data, evaluation = checked.config.data, checked.config.eval
    _check_path(checked, "data.prompt_data", data.prompt_data)
    try:
        paths = list(evaluation.data_sets.values())
    except ValueError as error:
        raise ConfigError(f"{checked.cite('eval.eval_prompt_data')}: {error}") from error
    for path in paths:
        _check_path(checked, "eval.eval_prompt_data", path)
    try:
        _ = data.template_variables
    except ValueError as error:
        raise ConfigError(
            f"{checked.cite('data.apply_chat_template_kwargs')}: {error}. Write it as in '{{\"enable_thinking\": false}}'"
        ) from error


def _check_path(checked: Checked, key: str, path: str) -> None:
    try:
        PromptPath.parse(path)
    except ValueError as error:
        raise ConfigError(f"{checked.cite(key)}: {error}. Rows count from 0, as in prompts.jsonl@[0:1000]") from error
