"""A config and where its values came from, for the messages of the checks."""

from collections.abc import Mapping
from dataclasses import dataclass

from slime_ppo.config.fields import Value, shown
from slime_ppo.config.root import OPTION_BY_KEY, Config
from slime_ppo.errors import ConfigError


@dataclass(frozen=True)
class Checked:
    """A config that can cite its options in messages."""

    config: Config
    origins: Mapping[str, str]
    values: Mapping[str, Value]

    def origin(self, key: str) -> str:
        """Where the value was given; a config built in Python has no origins."""
        return self.origins[key] if self.origins else "config"

    def cite(self, key: str) -> str:
        """`--flag value (file.yaml:12)`; the origin is left out where it is the flag itself or not known."""
        spec, value = OPTION_BY_KEY[key], self.values[key]
        given = "not set" if value is None else shown(value)
        written = spec.flag if value is True else spec.no_flag if value is False else f"{spec.flag} {given}"
        origin = self.origin(key)
        return written if origin == "config" or origin.startswith("--") else f"{written} ({origin})"

    def changed(self, key: str) -> bool:
        """True when the value is another one than the default."""
        return self.values[key] != OPTION_BY_KEY[key].default

    def refuse_unless_default(self, key: str, needed: str) -> None:
        """ConfigError when an option is set that only `needed` uses."""
        if self.changed(key):
            raise ConfigError(f"{self.cite(key)} is used only with {needed}. Add that, or leave it out")


def cite_restrictions(checked: Checked) -> str:
    """What restricts the sampler, with its values."""
    return " and ".join(checked.cite(f"rollout.{name}") for name in checked.config.rollout.restrictions)
