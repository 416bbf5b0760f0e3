"""SIGINT and SIGTERM as exceptions, so that every way out of a run passes the same clean-up; SIGTERM as a request to save first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end. `exit_code` is the shell's convention, 128 + signal number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Preempted(Interrupted):
    """SIGTERM asked the run to end, and it has come to where its state can be saved."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.exit_code = 3


class StopRequest:
    """SIGTERM to a run that saves: it ends at the next moment at which its state is whole.

    Between two rollouts and before a training `check` raises Preempted. Generation is not waited for: inside of `answering`, while
    the loop has said by `may_abort` that nothing is lost but answers, the signal raises at once, in the main thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._abortable = False
        self._raises = False

    def check(self) -> None:
        """Raise Preempted when the run was asked to end."""
        if self.requested:
            raise Preempted

    @contextmanager
    def may_abort(self) -> Iterator[None]:
        """The rollout can be begun anew: all of it that is done is generation. At its end it is a moment like the others."""
        self._abortable = True
        try:
            yield
        finally:
            self._abortable = False
        self.check()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The engine is busy, and no rank is."""
        if not self._abortable:
            yield
            return
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM is a request. When it has come, from the end of the block on both signals are ignored: the process ends."""
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            if self.requested:
                ignore_interrupts()
            elif signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, before)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        if self._raises:
            self._raises = False
            raise Preempted


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
