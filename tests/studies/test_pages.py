"""Marked places of pages are filled, exactly one each."""

from collections.abc import Callable
from pathlib import Path

import pytest
from studies.depth import depth_table
from studies.lengths import lengths_table
from studies.meta import meta_table
from studies.pages import fill_place
from studies.record import RESULTS, ROOT
from studies.reruns import reruns_table
from studies.scale import scale_table
from studies.switching import switching_table

TABLES = {
    "depth": depth_table,
    "lengths": lengths_table,
    "meta": meta_table,
    "reruns": reruns_table,
    "scale": scale_table,
    "switching": switching_table,
}


def test_only_what_stands_between_the_marks_changes():
    page = "a\n<!-- x -->\nold\n<!-- end x -->\nb\n<!-- y -->\n<!-- end y -->\n"
    filled = fill_place(page, "x", r"1 \1 {x}")
    assert filled == page.replace("old\n", "\n1 \\1 {x}\n\n")
    assert fill_place(filled, "x", r"1 \1 {x}") == filled


def test_no_place_and_several_are_refused():
    page = "<!-- x -->\n<!-- end x -->\n"
    with pytest.raises(ValueError, match="the page has no <!-- z -->"):
        fill_place(page, "z", "new")
    with pytest.raises(ValueError, match="the page has 2 <!-- x -->"):
        fill_place(page + page, "x", "new")


@pytest.mark.parametrize(("study", "written"), TABLES.items())
def test_the_page_says_what_was_recorded(study: str, written: Callable[[Path], str]):
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    assert fill_place(page, study, written(RESULTS / f"{study}.jsonl")) == page
