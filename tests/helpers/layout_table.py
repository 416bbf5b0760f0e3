"""Where the tests of the layout matrix leave what they have measured, for `--layout-table`."""

from pathlib import Path

import pytest

LAYOUT_ROWS = pytest.StashKey[dict]()
"""Layout name -> (ParallelLayout, Comparison), in the order of the tests."""


def write_table(target: Path, text: str) -> None:
    """Its folder need not be there: a fresh checkout has no runs/, and the matrix takes minutes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
