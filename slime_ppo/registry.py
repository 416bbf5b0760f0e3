"""Names of a seam's implementations, and dotted paths to the user's own."""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, TypeVar

from slime_ppo.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None


@dataclass(frozen=True)
class Registry(Generic[T]):
    """An immutable table name -> implementation (an object, or the dotted path it is imported from).

    `kind` is the word for an entry in messages, as in "reward function".
    """

    kind: str
    entries: Mapping[str, T]

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.entries))

    def resolve(self, name: str, *, origin: str) -> T:
        """The entry called `name`; `origin` is the flag or key that named it.

        Raises ConfigError that lists the known names and the nearest.
        """
        if name in self.entries:
            return self.entries[name]
        guess = nearest(name, self.entries)
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"{origin}: no {self.kind} is called {name!r}{hint} Known: {', '.join(self.names())}")


def split_dotted(path: str, *, origin: str) -> tuple[str, str]:
    """Module and attribute of "package.module.attribute". Raises ConfigError when `path` has another form."""
    module, _, attribute = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{origin}: {path!r} is no dotted path; expected package.module.attribute, as in my_rewards.score "
            "(a name that Python can import, not a file name)"
        )
    return module, attribute


def import_dotted(path: str, *, origin: str) -> object:
    """The object at "package.module.attribute".

    Raises ConfigError with the reason when the module does not import or has no such attribute.
    """
    module_name, attribute = split_dotted(path, origin=origin)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{origin}: {path} cannot be used, importing {module_name} raised {type(error).__name__}: {error}. "
            "Check the spelling, that its folder is on PYTHONPATH, and that the packages it needs are installed"
        ) from error
    found = vars(module)
    if attribute not in found:
        guess = nearest(attribute, (name for name in found if not name.startswith("_")))
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"{origin}: {module} has no {attribute!r}{hint}")
    return found[attribute]
