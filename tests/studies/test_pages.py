"""Marked places of pages are filled, exactly one each."""

import pytest
from studies.pages import fill_place


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
