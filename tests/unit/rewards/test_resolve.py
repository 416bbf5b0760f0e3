import subprocess
import sys

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.rewards.base import RewardSpec, resolve_reward


def test_resolve_name_gives_its_dotted_path() -> None:
    assert resolve_reward("vader", None) == RewardSpec("slime_ppo.rewards.vader.VaderReward", "--rm-type vader")


def test_resolve_custom_path_wins_over_the_name() -> None:
    assert resolve_reward("vader", "my_rewards.score") == RewardSpec("my_rewards.score", "--custom-rm-path")


def test_resolve_unknown_name_lists_known_and_nearest() -> None:
    with pytest.raises(ConfigError, match="--rm-type: no reward function is called 'vaader'; did you mean 'vader'\\? Known: vader"):
        resolve_reward("vaader", None)


def test_resolve_file_name_instead_of_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="--custom-rm-path: 'rewards/mine.py' is no dotted path"):
        resolve_reward(None, "rewards/mine.py")


def test_resolve_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no reward function: give --rm-type \(vader\), or --custom-rm-path"):
        resolve_reward(None, None)


def test_driver_modules_import_no_torch() -> None:
    modules = "data.schedule, slime_ppo.data.source, slime_ppo.data.tokenizer, slime_ppo.rewards.runner, slime_ppo.rewards.vader"
    code = f"import slime_ppo.{modules}, sys; sys.exit(str({{'torch', 'ray', 'transformers', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "set()"
