"""What all processes have that Ray starts: a log of their own, and a call that lasts as long as they live."""

import faulthandler
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

import ray


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
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(sys.stderr)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr, force=True)
        warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")

    @ray.method(concurrency_group="health")
    def outlive(self) -> None:
        """Never returns: its reference fails when this process dies, whatever else it was doing."""
        threading.Event().wait()
