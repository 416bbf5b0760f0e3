"""What `make layouts` leaves behind."""

from pathlib import Path

from tests.helpers.layout_table import write_table


def test_write_table_in_a_fresh_checkout_makes_the_folder(tmp_path: Path) -> None:
    write_table(tmp_path / "runs" / "layouts.md", "| layout |\n")
    assert (tmp_path / "runs" / "layouts.md").read_text() == "| layout |\n"
