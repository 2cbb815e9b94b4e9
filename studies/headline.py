"""The table of ten models in docs/studies.md, from recorded results; runs no model.

``python -m studies.headline`` rewrites what stands between ``<!-- headline -->`` and
``<!-- end headline -->``. Run it after :mod:`studies.tables` when results change; the
README shows some of the rows.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.pages import fill_place
from studies.record import RESULTS, ROOT
from studies.run import MODELS
from studies.tables import Line, Results, mebibytes, table, times


def headline(results: Results) -> str:
    """Return one row a model: its plain step, and two budgets."""
    rows = [
        [
            model,
            mebibytes(plain["plain_peak_bytes"]),
            _cell(results.budgets.get((model, "60%"))),
            _cell(results.budgets.get((model, "40%")))
            or _cell(results.budgets.get((model, "floor")), "smallest: "),
        ]
        for model in MODELS
        if (plain := results.budgets.get((model, "plain"))) is not None
    ]
    return table(
        ("model", "plain step", "within 60 %", "within 40 %, or the smallest"), rows
    )


def _cell(line: Line | None, before: str = "") -> str:
    if line is None or line["status"] != "ok":
        return ""
    kept = "" if line["is_within_budget"] else ", **over budget**"
    peak = mebibytes(line["measured_peak_bytes"])
    exact = ", **not exact**" if line["differs_from_captured"]["count"] else ""
    return f"{before}{peak}, {times(line['slowdown'])}{kept}{exact}"


def fill(page: str, results: Results) -> str:
    """Return the page with the table written anew.

    Raises
    ------
    ValueError
        If the page has not one place for it.
    """
    return fill_place(page, "headline", headline(results))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.headline")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs/studies.md", metavar="FILE"
    )
    options = parser.parse_args(arguments)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(fill(page, Results(options.results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
