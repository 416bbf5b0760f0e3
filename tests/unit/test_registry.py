import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.registry import Registry, import_dotted, nearest, split_dotted

REGISTRY = Registry("reward function", {"vader": 1, "math": 2})


def test_registry_known_name_gives_its_entry() -> None:
    assert REGISTRY.resolve("math", origin="--rm-type") == 2
    assert REGISTRY.names() == ("math", "vader")


def test_registry_unknown_name_lists_known_and_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        REGISTRY.resolve("Vadar", origin="--rm-type")
    assert str(error.value) == "--rm-type: no reward function is called 'Vadar'; did you mean 'vader'? Known: math, vader"


def test_registry_name_like_none_gives_no_guess() -> None:
    with pytest.raises(ConfigError) as error:
        REGISTRY.resolve("zzz", origin="--rm-type")
    assert "did you mean" not in str(error.value)
    assert "Known: math, vader" in str(error.value)


def test_nearest_ignores_case() -> None:
    assert nearest("VADER", ["math", "vader"]) == "vader"


@pytest.mark.parametrize("path", ["score", "", ".score", "my_rewards.", "my-rewards.score", "folder/my_rewards.py"])
def test_split_dotted_wrong_form_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="--custom-rm-path: .* is no dotted path; expected package.module.attribute"):
        split_dotted(path, origin="--custom-rm-path")


def test_import_dotted_gives_the_object() -> None:
    import json.decoder

    assert import_dotted("json.decoder.JSONDecoder", origin="--x") is json.decoder.JSONDecoder


def test_import_dotted_missing_module_says_why() -> None:
    with pytest.raises(ConfigError) as error:
        import_dotted("no_such_module.score", origin="--custom-rm-path")
    text = str(error.value)
    assert "--custom-rm-path: no_such_module.score cannot be used" in text
    assert "ModuleNotFoundError: No module named 'no_such_module'" in text
    assert "PYTHONPATH" in text


def test_import_dotted_missing_attribute_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"--x: <module 'json.decoder' from '.*decoder.py'> has no 'JSONDecodr'; did you mean 'JSONDecoder'\?"
    ):
        import_dotted("json.decoder.JSONDecodr", origin="--x")


def test_import_dotted_builtin_module_without_file_is_named() -> None:
    with pytest.raises(ConfigError, match="--x: <module 'sys' .*> has no 'nothing_like_it'"):
        import_dotted("sys.nothing_like_it", origin="--x")
