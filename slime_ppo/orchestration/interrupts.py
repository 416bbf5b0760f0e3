"""SIGINT and SIGTERM as exceptions, so that every way out of a run passes the same clean-up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end. `exit_code` is the shell's convention, 128 + signal number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def ignore_interrupts() -> None:
    """From now on SIGINT and SIGTERM do nothing: somebody else decides when this process ends, or it is ending already."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted in the main thread, once; from then on both are ignored, so that nothing cuts the
    clean-up short and the process ends by it."""

    def handler(number: int, _: FrameType | None) -> None:
        ignore_interrupts()
        raise Interrupted(number)

    previous = {sig: signal.signal(sig, handler) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            for sig, old in previous.items():
                signal.signal(sig, old)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """The signal handlers that stood before the block stand after it, whatever a library installs inside."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
