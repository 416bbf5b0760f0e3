"""What all processes have that Ray starts: a log of their own, and a call that lasts as long as they live."""

import threading
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

import ray

from slime_ppo.orchestration.process_log import log_to_file


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the traceback in this process's log; the driver shows one line of it. Goes outside of `ray.method`, whose
    marks Ray looks for on the innermost function."""

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException:
            traceback.print_exc()
            raise

    return wrapped


# something large, which stays in the object store, and something small, which the driver waits for
two_results = cast(Callable[[Callable[..., Any]], Callable[..., Any]], ray.method(num_returns=2))


class Process:
    """What all our processes have: a log of their own, and a call that lasts as long as they live."""

    def __init__(self, name: str, log_dir: str) -> None:
        log_to_file(Path(log_dir) / f"{name}.log")
        warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")

    @ray.method(concurrency_group="health")
    def outlive(self) -> None:
        """Never returns: its reference fails when this process dies, whatever else it was doing."""
        threading.Event().wait()
