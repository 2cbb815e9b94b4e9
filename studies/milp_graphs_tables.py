"""Table of :mod:`studies.milp_graphs`; plans nothing.

``python -m studies.milp_graphs_tables`` rewrites what stands between
``<!-- milp-graphs -->`` and ``<!-- end milp-graphs -->`` in ``docs/milp.md``.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from studies.milp_graphs import METHODS, STUDY
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, read
from studies.tables import table

Line = dict[str, Any]
Case = tuple[str, int, float]
"""A graph, a budget in percent of the store-all peak, and a time limit."""


def by_case(lines: Iterable[Line]) -> dict[Case, dict[str, Line]]:
    """Return the last line of each method, by graph, budget and limit."""
    found: dict[Case, dict[str, Line]] = {}
    for line in lines:
        case = (line["model"], line["percent"], line["limit_s"])
        found.setdefault(case, {})[line["method"]] = line
    order = {
        line["model"]: line["ops"] for cell in found.values() for line in cell.values()
    }
    return dict(
        sorted(
            found.items(), key=lambda item: (order[item[0][0]], -item[0][1], item[0][2])
        )
    )


def cell(line: Line | None, cheapest_ns: int | None) -> str:
    """Return cost over that of storing everything, gap and time; the best in bold."""
    if line is None:
        return ""
    seconds = f"{line['elapsed_s']:.0f} s"
    if line["cost_ns"] is None:
        status = "infeasible" if line["status"] == "infeasible" else "none"
        return f"{status}, {seconds}"
    cost = f"{line['cost_ns'] / line['plain_ns']:.4f}"
    if line["cost_ns"] == cheapest_ns:
        cost = f"**{cost}**"
    # Coarse stages prove nothing beyond what holds for any schedule.
    has_bound = line["bound_ns"] > line["plain_ns"] or line["status"] == "optimal"
    gap = f", {100 * line['gap']:.2f} %" if has_bound else ""
    if line["status"] == "optimal":
        gap = ", optimal"
    return f"{cost}{gap}, {seconds}"


def comparison(cases: dict[Case, dict[str, Line]]) -> str:
    """Return the table of all graphs, budgets and methods."""
    head = ("graph", "ops", "budget", "limit", *METHODS)
    rows: list[Sequence[str]] = []
    for (graph, percent, limit_s), found in cases.items():
        costs = [line["cost_ns"] for line in found.values() if line["cost_ns"]]
        cheapest = min(costs, default=None)
        some = next(iter(found.values()))
        rows.append(
            [
                graph.split("_512")[0].split("_256")[0].split("_32")[0],
                str(some["ops"]),
                f"{percent} %",
                f"{limit_s:.0f} s",
                *(cell(found.get(method), cheapest) for method in METHODS),
            ]
        )
    return table(head, rows)


def against_published(cases: dict[Case, dict[str, Line]]) -> str:
    """Return how the default compares with the published rows under one limit."""
    better = equal = worse = missed = 0
    for found in cases.values():
        if not {"default", "published rows"} <= set(found):
            continue
        ours, theirs = found["default"]["cost_ns"], found["published rows"]["cost_ns"]
        better += ours is not None and (theirs is None or ours < theirs)
        equal += ours is not None and ours == theirs
        worse += theirs is not None and (ours is None or ours > theirs)
        missed += ours is None and theirs is None
    return (
        f"The default against the published rows, same solver and limit: cheaper in "
        f"{better} cases, equal in {equal}, worse in {worse}, no schedule by either in "
        f"{missed}."
    )


def rewrite(page: Path, results: Path) -> None:
    """Write the table into a page.

    Raises
    ------
    ValueError
        If the page has not one place for it.
    """
    cases = by_case(read(results))
    text = f"{comparison(cases)}\n\n{against_published(cases)}"
    content = page.read_text(encoding="utf-8")
    page.write_text(fill_place(content, "milp-graphs", text), encoding="utf-8")


if __name__ == "__main__":
    rewrite(ROOT / "docs" / "milp.md", RESULTS / f"{STUDY}.jsonl")
    sys.exit(0)
