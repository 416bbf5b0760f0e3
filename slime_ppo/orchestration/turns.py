"""Who owns shared devices. Exactly one tenant is awake; the exception is weight sync, which needs two."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime_ppo.errors import RolloutError
from slime_ppo.orchestration.protocols import Tenant
from slime_ppo.rollout.engine import EnginePart, RolloutEngine

_log = logging.getLogger(__name__)


@dataclass
class DeviceTurns:
    """Wakes one tenant at a time and offloads the others; nothing wakes or sleeps as a side effect of something else.

    All tenants start offloaded. With `offload` False (all fits together, or each has devices of its own) they start, and stay,
    awake. `events` keeps ("wake" or "offload", tenant) in order; `on_time` gets the seconds of each change.
    """

    tenants: Mapping[str, Tenant]
    offload: bool
    on_time: Callable[[str, float], None]
    events: list[tuple[str, str]] = field(default_factory=list)
    awake: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.awake = set() if self.offload else set(self.tenants)

    def is_awake(self, name: str) -> bool:
        return name in self.awake

    def take(self, name: str) -> None:
        """Make `name` the only tenant that is awake."""
        self._offload_all_but({name})
        self._wake(name)

    @contextmanager
    def together(self, first: str, second: str) -> Iterator[None]:
        """Two tenants awake for a weight sync; afterwards only the second is."""
        self._offload_all_but({first, second})
        self._wake(first)
        self._wake(second)
        yield
        self._offload_all_but({second})

    def renew(self, name: str) -> None:
        """Make `name` the only tenant that is awake, and take it through a sleep of its own: what has died in it starts anew, with
        the devices to itself. Also where nothing is offloaded otherwise."""
        self._offload_all_but({name})
        self._change("offload", name, self.tenants[name].offload)
        self._change("wake", name, self.tenants[name].wake)
        self.awake.add(name)

    def _wake(self, name: str) -> None:
        if name not in self.awake:
            self._change("wake", name, self.tenants[name].wake)
            self.awake.add(name)

    def _offload_all_but(self, kept: set[str]) -> None:
        if self.offload:
            for name in sorted(self.awake - kept):
                self._change("offload", name, self.tenants[name].offload)
                self.awake.remove(name)

    def _change(self, verb: str, name: str, change: Callable[[], None]) -> None:
        before = self.tenants[name].resident_bytes()
        start = time.perf_counter()
        change()
        self.on_time(verb, time.perf_counter() - start)
        self.events.append((verb, name))
        _log.info("%s %s: %.1f MB -> %.1f MB", verb, name, before / 1e6, self.tenants[name].resident_bytes() / 1e6)


class RolloutTenant:
    """The engine as one of the tenants that take turns. Its weights wake first; the KV cache after the weight sync."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def wake(self) -> None:
        self._engine.wake(EnginePart.WEIGHTS)

    def offload(self) -> None:
        self._engine.offload(EnginePart.ALL)

    def resident_bytes(self) -> int:
        try:
            return self._engine.health().bytes_resident
        except RolloutError as error:  # an engine that is lost holds nothing
            _log.warning("%s", error)
            return 0
