"""Servers started together: whatever goes wrong meanwhile, none is left behind."""

import signal
from threading import Event, Timer, main_thread

import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.fleet import ServerFleet
from slime_ppo.rollout.sglang.server import ServerAddress


class _Server:
    """Loads until it is stopped, or says that it is ready where nothing listens."""

    def __init__(self, *, loads: bool) -> None:
        self._loads = loads
        self.stopped = Event()

    def start(self) -> ServerAddress:
        if self._loads:
            assert self.stopped.wait(20)
            raise RolloutError("it was stopped")
        return ServerAddress("http://127.0.0.1:1", 1, 1)

    def problem(self) -> str | None:
        return "its HTTP process died"

    def stop(self) -> None:
        self.stopped.set()


def test_fleet_an_interrupt_ends_servers_that_still_load() -> None:
    servers = [_Server(loads=True), _Server(loads=False)]
    assert (ident := main_thread().ident) is not None
    Timer(0.3, signal.pthread_kill, (ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ServerFleet(servers, None)
    assert all(server.stopped.is_set() for server in servers)


def test_fleet_of_a_server_that_dies_right_after_its_start_leaves_none() -> None:
    server = _Server(loads=False)
    with pytest.raises(RolloutError, match="its HTTP process died"):
        ServerFleet([server], None)
    assert server.stopped.is_set()
