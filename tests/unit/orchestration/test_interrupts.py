"""SIGINT and SIGTERM raise once, where the main thread is; handlers of before come back. A request to stop waits for its moment."""

import signal
from collections.abc import Iterator

import pytest

from slime_ppo.orchestration.interrupts import Interrupted, Preempted, StopRequest, interrupts_raise

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


def test_stop_request_waits_for_the_next_check(own_handlers: list[int]) -> None:
    stop = StopRequest()
    with pytest.raises(Preempted, match="^SIGTERM$") as caught, interrupts_raise(), stop.listening():
        stop.check()
        signal.raise_signal(signal.SIGTERM)
        with stop.answering():  # not within may_abort: ranks have trained
            pass
        assert stop.requested
        stop.check()
    assert caught.value.exit_code == 3 and isinstance(caught.value, Interrupted)
    signal.raise_signal(signal.SIGTERM)  # a second one does not disturb the clean-up
    assert own_handlers == []


def test_stop_request_cuts_an_answer_that_may_be_given_anew(own_handlers: list[int]) -> None:
    stop = StopRequest()
    with pytest.raises(Preempted), interrupts_raise(), stop.listening(), stop.may_abort(), stop.answering():
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal did not end the answer")


def test_stop_request_of_before_an_answer_does_not_let_it_begin(own_handlers: list[int]) -> None:
    stop = StopRequest()
    with pytest.raises(Preempted), interrupts_raise(), stop.listening(), stop.may_abort():
        signal.raise_signal(signal.SIGTERM)
        with stop.answering():
            raise AssertionError("it began")


def test_stop_request_after_all_answers_ends_at_the_end_of_the_block(own_handlers: list[int]) -> None:
    stop = StopRequest()
    rewarded = False
    with pytest.raises(Preempted), interrupts_raise(), stop.listening():
        with stop.may_abort():
            signal.raise_signal(signal.SIGTERM)
            rewarded = True
        raise AssertionError("it went on")
    assert rewarded


def test_stop_request_leaves_sigint_as_it_is_and_puts_the_handler_back(own_handlers: list[int]) -> None:
    stop = StopRequest()
    with pytest.raises(Interrupted, match="SIGINT") as caught, interrupts_raise(), stop.listening():
        signal.raise_signal(signal.SIGINT)
    assert caught.value.exit_code == 130
    signal.signal(signal.SIGTERM, lambda number, _: own_handlers.append(number))
    with stop.listening():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert own_handlers == [signal.SIGTERM]
