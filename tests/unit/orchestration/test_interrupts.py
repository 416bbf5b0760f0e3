"""SIGINT and SIGTERM raise once, where the main thread is; handlers of before come back."""

import signal
from collections.abc import Iterator

import pytest

from slime_ppo.orchestration.interrupts import Interrupted, interrupts_raise

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[list[int]]:
    """Handlers that note what reaches them stand there before the test; pytest's own ones after it."""
    noted: list[int] = []
    before = {sig: signal.signal(sig, lambda number, _: noted.append(number)) for sig in BOTH}
    yield noted
    for sig, handler in before.items():
        signal.signal(sig, handler)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupts_raise_signal_ends_the_block_with_the_shells_exit_code(
    number: signal.Signals, exit_code: int, own_handlers: list[int]
) -> None:
    with pytest.raises(Interrupted, match=f"^{number.name}$") as caught, interrupts_raise():
        signal.raise_signal(number)
        raise AssertionError("the signal did not end the block")
    assert caught.value.exit_code == exit_code
    assert isinstance(caught.value, KeyboardInterrupt)  # `except Exception` must not swallow it
    assert own_handlers == []


@pytest.mark.parametrize("second", BOTH)
def test_interrupts_raise_second_signal_does_not_disturb_the_clean_up(second: signal.Signals, own_handlers: list[int]) -> None:
    cleaned = False
    with pytest.raises(Interrupted, match="SIGINT"), interrupts_raise():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(second)
            cleaned = True
    assert cleaned and own_handlers == []


def test_interrupts_raise_entered_again_outer_clean_up_is_not_disturbed_either(own_handlers: list[int]) -> None:
    """Something between the two blocks has installed its own handlers, as ray.init does."""
    cleaned = False
    with pytest.raises(Interrupted, match="SIGTERM"), interrupts_raise():
        try:
            signal.signal(signal.SIGTERM, lambda number, _: own_handlers.append(-1))
            with interrupts_raise():
                signal.raise_signal(signal.SIGTERM)
        finally:
            for sig in BOTH:
                signal.raise_signal(sig)
            cleaned = True
    assert cleaned and own_handlers == []


def test_interrupts_raise_quiet_block_puts_the_handlers_back(own_handlers: list[int]) -> None:
    with interrupts_raise(), interrupts_raise():
        pass
    for sig in BOTH:
        signal.raise_signal(sig)
    assert own_handlers == list(BOTH)


def test_interrupts_raise_block_that_fails_puts_the_handlers_back(own_handlers: list[int]) -> None:
    with pytest.raises(ValueError, match="of the block"), interrupts_raise():
        raise ValueError("of the block")
    for sig in BOTH:
        signal.raise_signal(sig)
    assert own_handlers == list(BOTH)
