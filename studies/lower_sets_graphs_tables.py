"""Tables of :mod:`studies.lower_sets_graphs`; plans nothing.

``python -m studies.lower_sets_graphs_tables`` rewrites what stands between
``<!-- lower-sets-graphs -->`` and ``<!-- end lower-sets-graphs -->`` in
``docs/lower-sets.md``.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from studies.lower_sets_graphs import EXPLODING, STUDY
from studies.lower_sets_references import REFERENCES
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, read
from studies.tables import table

Line = dict[str, Any]


def latest(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Return the last line of each network and case that ended well."""
    return {
        (line["model"], line["case"]): line for line in lines if line["status"] == "ok"
    }


def gigabytes(size_bytes: float) -> str:
    """Return a size in the unit of the paper."""
    return f"{size_bytes / 1e9:.3f}"


def seconds(values: Sequence[Line], before_s: float = 0.0) -> str:
    """Return the longest of some times, by the measured process's own clock."""
    longest = before_s + max(value["cpu_s"] for value in values)
    return f"{longest:.3f}" if longest < 1 else f"{longest:.1f}"


def planning_seconds(line: Line) -> str:
    """Return the time to make a family and to find the slowest answer in it."""
    return seconds(list(queries(line).values()), line["family"]["cpu_s"])


def queries(line: Line, *, charge_last: bool = False) -> dict[float, Line]:
    """Return the queries for the least overhead, by multiple of the smallest budget."""
    return {
        query["multiple"]: query
        for query in line["queries"]
        if query["objective"] == "least overhead"
        and query["charge_last"] is charge_last
    }


def planning_table(lines: dict[tuple[str, str], Line]) -> str:
    """Return counts, smallest budgets, and seconds of planning."""
    head = (
        "network",
        "values",
        "lower sets",
        "smallest budget, GB",
        "exact, s",
        "plain C++, s",
        "plain Python, s",
        "approximate, s",
        "its sets",
        "its smallest budget",
        "its overhead over exact",
        "exact: memory, MB",
    )
    rows: list[Sequence[str]] = []
    for network in (*REFERENCES, *EXPLODING):
        near = lines.get((network, "approximate"))
        if near is None:
            continue
        exact = lines.get((network, "exact"))
        least = near["smallest_budget"]["bytes"]
        row = [network, str(near["nodes"])]
        if exact is None:
            row += ["> 40 000", f"≤ {gigabytes(least)}", "", "", ""]
        else:
            row += [
                f"{exact['sets']:,}".replace(",", " "),
                gigabytes(exact["smallest_budget"]["bytes"]),
                planning_seconds(exact),
                plain_seconds(lines.get((network, "plain C++"))),
                plain_seconds(lines.get((network, "plain Python"))),
            ]
        row += [
            planning_seconds(near),
            str(near["sets"]),
            "" if exact is None else ratio(least, exact["smallest_budget"]["bytes"]),
            "" if exact is None else overhead_gap(near, exact),
            "" if exact is None else f"{exact['rss_bytes'] / 1e6:.0f}",
        ]
        rows.append(row)
    return table(head, rows)


def plain_seconds(line: Line | None) -> str:
    """Return the times of the plain recurrence; a bound where it was stopped."""
    if line is None:
        return ""
    stopped = [query for query in line["queries"] if query["timed_out"]]
    if stopped:
        return f"> {stopped[0]['cpu_s']:.0f}"
    return seconds(line["queries"])


def ratio(value: float, reference: float) -> str:
    """Return how much more a value is than the one it is compared with."""
    more = value / reference - 1
    return "the same" if more < 5e-6 else f"+{100 * more:.2g} %"


def overhead_gap(near: Line, exact: Line) -> str:
    """Return the worst gap at 1.1 times the smallest budget and more."""
    gaps = [0.0]
    for multiple, best in queries(exact).items():
        found = queries(near)[multiple]["overhead"]
        if multiple >= 1.1:
            gaps.append((found - best["overhead"]) / max(1, best["overhead"]))
    return "none" if max(gaps) == 0 else f"+{100 * max(gaps):.1f} %"


def dominating(line: Line, peak_gb: float, percent: float) -> tuple[str, str, bool]:
    """Return our least peak at no more overhead, our least overhead at no more peak."""
    # References are rounded: to MB, and to whole percents above 10.
    slack_bytes, slack_percent = 0.5e6, 0.5 if percent > 10 else 0.05
    points = [
        (point["peak_bytes"], point["overhead_percent"]) for point in line["points"]
    ]
    peaks = [b for b, p in points if p <= percent + slack_percent]
    overheads = [p for b, p in points if b <= peak_gb * 1e9 + slack_bytes]
    peak = gigabytes(min(peaks)) if peaks else "none"
    overhead = f"{min(overheads):.1f} %" if overheads else "none"
    is_met = bool(peaks) and min(peaks) <= peak_gb * 1e9 + slack_bytes
    return peak, overhead, is_met


def judged_table(lines: dict[tuple[str, str], Line]) -> str:
    """Return the peaks after liveness beside those of the published method."""
    head = (
        "network",
        "published",
        "its peak, GB",
        "its overhead",
        "our least peak at that overhead",
        "our least overhead at that peak",
        "at or below",
    )
    rows: list[Sequence[str]] = []
    for network, reference in REFERENCES.items():
        line = lines.get((network, "judged"))
        if line is None:
            continue
        chen = line["chen"]["peak_bytes"] / 1e9, line["chen"]["overhead_percent"]
        for name, (peak_gb, percent) in {**reference.variants, "Chen": chen}.items():
            peak, overhead, is_met = dominating(line, peak_gb, percent)
            rows.append(
                [
                    network,
                    name,
                    f"{peak_gb:.3f}",
                    f"{percent:.0f} %" if percent > 10 else f"{percent:.1f} %",
                    peak,
                    overhead,
                    "yes" if is_met else "**no**",
                ]
            )
    return table(head, rows)


def text(lines: dict[tuple[str, str], Line]) -> str:
    """Return what goes into the page."""
    timing = (
        "Seconds are those of the process alone, one thread, family and program, for "
        "the slowest of seven budgets from the smallest to five times it; the plain "
        "recurrences at the smallest budget and 1.1 times it. Budgets and peaks are of "
        "values and their gradients alone."
    )
    judging = (
        "Peaks that the judge finds after the liveness pass, and overheads in percent "
        "of one forward pass."
    )
    return f"{timing}\n\n{planning_table(lines)}\n\n{judging}\n\n{judged_table(lines)}"


def main() -> int:
    page = ROOT / "docs" / "lower-sets.md"
    rewrite(page, RESULTS / f"{STUDY}.jsonl")
    return 0


def rewrite(page: Path, results: Path) -> None:
    """Write the tables into a page.

    Raises
    ------
    ValueError
        If the page has not one place for them.
    """
    content = page.read_text(encoding="utf-8")
    filled = fill_place(content, "lower-sets-graphs", text(latest(read(results))))
    page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
