"""The generated flag reference."""

from pathlib import Path

from slime_ppo.config.flag_reference import flag_reference
from slime_ppo.config.root import OPTION_BY_KEY, SECTIONS

README = Path(__file__).resolve().parents[3] / "configs" / "README.md"


def test_configs_readme_is_what_the_generator_writes() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == flag_reference(), "run `python -m slime_ppo.config.flag_reference > configs/README.md`"


def test_flag_reference_has_a_table_per_section_and_a_row_per_option() -> None:
    lines = flag_reference().splitlines()
    assert [line for line in lines if line.startswith("## ")] == [f"## `{section}`" for section in (*SECTIONS, "sft")]
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(OPTION_BY_KEY)
    assert [spec.flag for spec, row in zip(OPTION_BY_KEY.values(), rows, strict=True) if f"`{spec.flag}`" not in row] == []
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}
