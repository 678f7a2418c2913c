"""The cells of the whole cross product: that nothing is missing, and that what is drawn can be survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.cells import MOMENTS, Cell, cells
from tests.faults.harness import DP2_OVERLAP, DP2_WHOLE, TP2_DP1, Layout
from tests.faults.layouts import LAYOUTS
from tests.pages import write_section

CELLS = cells(2)


def test_every_layout_of_the_tests_is_there() -> None:
    trained = {cell.layout for cell in CELLS}
    missing = [one.name for one in vars(harness).values() if isinstance(one, Layout) and one not in trained]
    assert missing == []


def test_a_name_is_the_name_of_one_thing() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    # The run of the unmodified framework is kept under the name of its layout.
    assert len({cell.layout.name for cell in CELLS}) == len({cell.layout for cell in CELLS})


def test_the_first_turn_has_every_layout_once() -> None:
    assert [cell.family for cell in CELLS[: len(LAYOUTS)]] == [layout.name for layout in LAYOUTS]


def test_with_one_fault_each_combination_has_one_and_each_layout_both_moments() -> None:
    few = cells(1)
    assert set(few) < set(CELLS)
    combinations = {cell.name.rpartition(" / ")[0] for cell in CELLS}
    assert sorted(cell.name.rpartition(" / ")[0] for cell in few) == sorted(combinations)
    for layout in LAYOUTS:
        assert {cell.moment for cell in few if cell.family == layout.name} == set(MOMENTS)


def test_a_fault_is_drawn_by_the_seed_and_the_name_alone() -> None:
    drawn = [cell.fault(1, ()) for cell in CELLS]
    assert drawn == [cell.fault(1, ()) for cell in cells(2)]
    assert drawn != [cell.fault(2, ()) for cell in CELLS]
    for cell, (fault, saved) in zip(CELLS, drawn, strict=True):
        assert fault.phase in cell.phases()
        assert fault.rank in range(cell.layout.processes)
        assert saved <= {(fault.step or 0) - 1, fault.step}
    assert all(cell.fault(1, {6})[0].step == 7 for cell in CELLS)


@pytest.mark.parametrize(
    ("layout", "replica", "copies", "phases"),
    [
        (DP2_WHOLE, "none", False, {"norm", "door-before", "door-after", "update", "between"}),
        (DP2_OVERLAP, "split", True, {"norm", "door-before", "door-after", "copy", "update", "between"}),
        (TP2_DP1, "none", False, {"norm", "between"}),
        (TP2_DP1, "none", True, {"norm", "door-before", "door-after", "copy", "update", "gather", "between"}),
    ],
)
def test_phases(layout: Layout, replica: str, copies: bool, phases: set[str]) -> None:
    assert set(Cell(layout.name, layout, replica, copies, "torch", "late").phases()) == phases


def test_a_rank_that_is_alone_raises_and_is_not_killed() -> None:
    kinds = {(cell.alone, cell.fault(1, ())[0].kind) for cell in CELLS}
    assert kinds == {(True, "exception"), (False, "sigkill")}


def test_a_section_of_a_page_is_replaced_and_the_rest_is_left(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nWords.\n\n## One\n\nold\n\n### Part of it\n\nold\n\n## Two\n\ntwo\n")
    write_section(page, "One", "new\n")
    assert page.read_text() == "# Title\n\nWords.\n\n## One\n\nnew\n\n## Two\n\ntwo\n"
    write_section(page, "Two", "other")
    write_section(page, "Three", "three")
    assert page.read_text() == "# Title\n\nWords.\n\n## One\n\nnew\n\n## Two\n\nother\n\n## Three\n\nthree\n"
