"""The table of predicted and measured memory, on a pool that does not compute."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.resident_memory import ResidentBytes, TrainedModel, resident_bytes
from tests.helpers.configs import write_model_folder
from tools.layouts import memory
from tools.layouts.memory import LAYOUTS, Measured, as_text, memory_rows

KILO = ResidentBytes(1000, 1000, 1000, 1000)


class ObedientPool:
    """Ranks that hold what is predicted, but for twice the moments on the last rank of a role."""

    def __init__(self, folder: Path) -> None:
        self._shape = ModelShape.from_hf_folder(folder)

    def run(self, target: str, *, world: int, **kwargs: Any) -> list[Any]:
        assert target == "tools.layouts.memory_ranks:measure" and world == kwargs["layout"].num_ranks
        model = TrainedModel(self._shape, kwargs["dtype"], value_head=False, make_vocab_size_divisible_by=kwargs["divisible_by"])
        ranks = [resident_bytes(model, kwargs["layout"], pp_rank=kwargs["layout"].pp_rank(rank)) for rank in range(world)]
        ranks[-1] = replace(ranks[-1], moments=2 * ranks[-1].moments)
        return [dict.fromkeys(kwargs["roles"], rank) for rank in ranks]


def test_measured_error_is_that_of_the_worst_part_of_the_worst_rank() -> None:
    assert Measured([KILO, KILO], [KILO, KILO]).error == 0
    assert Measured([KILO, KILO], [KILO, replace(KILO, grads=990)]).error == pytest.approx(0.01)
    assert Measured([KILO, KILO], [replace(KILO, moments=1030), replace(KILO, grads=990)]).error == pytest.approx(0.03)


def test_measured_error_of_bytes_where_none_should_be_is_not_lost() -> None:
    none = replace(KILO, main_params=0)
    assert Measured([none], [none]).error == 0
    assert Measured([none], [KILO]).error == 1000


def test_measured_largest_is_the_rank_for_which_most_was_predicted() -> None:
    small, large = replace(KILO, params=10), replace(KILO, params=2000)
    assert Measured([small, large], [large, small]).largest == (large, small)


def test_memory_rows_show_the_largest_rank_of_every_layout_and_what_is_off(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    head, *rows = memory_rows(ObedientPool(folder), str(folder))
    assert head[0] == "layout" and [row[0] for row in rows] == list(LAYOUTS)
    by_layout = {row[0]: row for row in rows}
    # 869,504 parameters: 2 + 4 + 4 bytes of each, moments of 8, doubled here
    assert by_layout["one rank"] == ("one rank", "1.74", "3.48", "3.48", "13.91", "22.61", "15.65", "100%", "100.00%")
    # the first rank is not off, and no other one is larger
    assert by_layout["dp2"][1:] == ("1.74", "3.48", "1.74", "3.48", "10.43", "10.43", "46%", "100.00%")


def test_as_text_is_a_markdown_table_of_equal_widths() -> None:
    assert as_text([("layout", "total"), ("dp2", "1.5")]) == "| layout | total |\n| ------ | ----: |\n| dp2    |   1.5 |"


def test_main_prints_the_table_of_the_role_and_dtype_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {}

    class NoPool:
        def __init__(self, preload: list[str]) -> None: ...

        def __enter__(self) -> "NoPool":
            return self

        def __exit__(self, *_: object) -> None: ...

    def rows(pool: NoPool, folder: str, **options: str) -> list[tuple[str, ...]]:
        asked.update(options, folder=folder)
        return [("layout",), ("dp2",)]

    monkeypatch.setattr("tests.helpers.rank_pool.RankPool", NoPool)
    monkeypatch.setattr(memory, "memory_rows", rows)
    monkeypatch.setattr("sys.argv", ["memory.py", "folder", "--role", "critic", "--dtype", "float32"])
    memory.main()
    assert asked == {"folder": "folder", "role": "critic", "dtype": "float32"}
    assert capsys.readouterr().out == "| layout |\n| ------ |\n| dp2    |\n"
