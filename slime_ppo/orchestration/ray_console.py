"""Keeps Ray's own messages off the console: they go to the driver's log.

With `log_to_driver=False` Ray still prints what its raylet reports, a 1,200-character paragraph when a worker dies, beside
our one summary. It has no switch for it, so the printing function is replaced here; remove this file when it has one.
"""

import logging
from typing import Any

import ray._private.worker as ray_worker_module

_log = logging.getLogger(__name__)


def quiet_ray() -> None:
    """Send Ray's messages to the log of this process. Call before `ray.init`."""
    if not hasattr(ray_worker_module, "print_to_stdstream"):
        return  # another Ray: its messages show, nothing breaks

    def to_log(data: Any, ignore_prefix: bool) -> None:
        _log.info("ray: %s", " ".join(str(line) for line in data["lines"]))

    ray_worker_module.print_to_stdstream = to_log
