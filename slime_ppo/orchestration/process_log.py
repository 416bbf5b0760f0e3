"""The logs of the processes of a run. They grow behind what an earlier run has left there: it may tell why that one ended."""

import faulthandler
import logging
import os
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(name)s %(message)s"


def log_to_file(path: Path) -> None:
    """From now on all that this process writes to stdout and stderr goes into the file, logging and the traces of crashes, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(sys.stderr)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr, force=True)


def libraries_to_file(path: Path) -> None:
    """From now on what libraries log goes into the file; stdout and stderr stay the console's. For a driver that is a rank."""
    noise = logging.FileHandler(path, encoding="utf-8")
    noise.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().handlers = [noise]
