"""Where the tests of the layout matrix leave what they have measured, for `--layout-table`."""

import pytest

LAYOUT_ROWS = pytest.StashKey[dict]()
"""Layout name -> (ParallelLayout, Comparison), in the order of the tests."""
