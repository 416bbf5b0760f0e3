"""Where the output of a rank goes."""

import logging
import os
from pathlib import Path

from slime_ppo.orchestration.process_log import libraries_to_file, log_to_file


def write_in_a_child(log: Path, text: str) -> None:
    """A process that writes to all that ends in its log."""
    pid = os.fork()
    if pid == 0:
        log_to_file(log)
        os.write(1, f"{text} to stdout\n".encode())
        os.write(2, f"{text} to stderr\n".encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_log_to_file_takes_stdout_and_stderr_behind_what_an_earlier_run_has_left(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "actor-0.log"
    for text in ("first", "second"):
        write_in_a_child(log, text)
    assert log.read_text() == "first to stdout\nfirst to stderr\nsecond to stdout\nsecond to stderr\n"


def test_libraries_to_file_grows_behind_what_an_earlier_run_has_left(tmp_path: Path) -> None:
    root, log = logging.getLogger(), tmp_path / "rank-0.log"
    log.write_text("earlier\n")
    before = root.handlers
    try:
        libraries_to_file(log)
        logging.getLogger("a.library").warning("noise")
    finally:
        root.handlers = before
    earlier, noise = log.read_text().splitlines()
    assert earlier == "earlier" and noise.endswith(" a.library noise")
