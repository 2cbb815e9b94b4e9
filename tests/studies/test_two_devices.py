"""The study of two devices: its records and its table in the documentation."""

from pathlib import Path

from studies.record import read
from studies.two_devices import FILE, HEADER, table

PAGE = Path(__file__).parents[2] / "docs" / "xengine.md"


def test_table_of_the_page_is_what_is_recorded():
    printed = table(read(FILE)).splitlines()
    text = PAGE.read_text(encoding="utf-8")
    shown = text.split(HEADER)[1].split("\n\n")[0].strip().splitlines()
    assert shown
    assert set(shown) <= set(printed)


def test_recorded_plans_keep_to_their_budgets():
    for line in read(FILE):
        budgets = line["budgets_bytes"]
        if line.get("home") == "cpu":
            budgets = budgets[::-1]
        for plan in (line["serial"], line["overlapped"]):
            peaks = plan.get("peak_bytes", (0, 0))
            assert all(p <= b for p, b in zip(peaks, budgets, strict=True))
            assert plan.get("bound_ns", 0) <= plan.get("serial_ns", 0)
