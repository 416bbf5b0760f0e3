"""Telling a cause from its echoes, when several ranks fail within moments of each other."""

from slime_ppo.errors import EchoedError

_COLLECTIVE_MARKS = ("Connection reset by peer", "Connection closed by peer", "gloo", "NCCL", "Connection refused")


def is_echo(error: BaseException) -> bool:
    """True for a broken collective, which mostly means that another rank has left, and for another rank's bad news."""
    return isinstance(error, EchoedError) or any(mark in str(error) for mark in _COLLECTIVE_MARKS)
