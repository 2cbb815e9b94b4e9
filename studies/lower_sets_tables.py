"""Tables and figures of :mod:`studies.lower_sets_networks`; runs no model.

``python -m studies.lower_sets_tables`` rewrites what stands between
``<!-- lower-sets-networks -->`` and ``<!-- end lower-sets-networks -->`` in
``docs/lower-sets.md``, and draws ``docs/images/lower-sets-<network>.svg``.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat.report.figures import save_figure
from studies.lower_sets_networks import METHODS, NETWORKS, PAPER_CASE, STUDY
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, measured_on, read
from studies.tables import load, mebibytes, milliseconds, seconds, table, times

Line = dict[str, Any]
# Okabe and Ito's palette; remat's own choice, plain and checkpoint as in the other
# studies. Markers and line styles differ too, so that figures survive printing in grey.
_STYLES = {
    "checkpoint": ("#d55e00", "^", ":"),
    "chen-lower-sets": ("#000000", "*", ""),
    "chen-sqrt": ("#e69f00", "D", ""),
    "chen-greedy": ("#e69f00", "v", "--"),
    "lower-sets-approx": ("#56b4e9", "s", "-."),
    "lower-sets": ("#009e73", "P", "--"),
    "auto": ("#0072b2", "o", "-"),
}
_OTHER_STYLE = ("#cc79a7", "x", "--")
_GREY = "#7f7f7f"
_ENDED = frozenset({"ok", "below floor"})


class NetworkResults:
    """The newest line of every network, method and case at full size on the CPU.

    Parameters
    ----------
    folder
        Where the ``.jsonl`` files are.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: dict[tuple[str, str, str], Line] = {}
        for line in read(folder / f"{STUDY}.jsonl"):
            size = line["settings"]["model"]
            if (size["tiny"], size["scale"], size["device"]) == (False, 1, "cpu"):
                key = (line["model"], line["method"], line["case"])
                self.lines[key] = line

    @property
    def failures(self) -> list[Line]:
        """What failed, and did not succeed later."""
        ended = [line for line in self.lines.values() if line["status"] in _ENDED]
        return [
            line
            for line in self.lines.values()
            if line["status"] not in _ENDED
            and not any(
                (other["model"], other["method"]) == (line["model"], line["method"])
                and other["date"] > line["date"]
                for other in ended
            )
        ]

    @property
    def networks(self) -> list[str]:
        """The networks that have results, in the paper's order."""
        found = {model for model, _, _ in self.lines}
        return [name for name in NETWORKS if name in found]

    @property
    def methods(self) -> list[str]:
        """The methods that have results besides plain, in the order of the study."""
        found = dict.fromkeys(method for _, method, _ in self.lines)
        ordered = [*METHODS, *(name for name in found if name not in METHODS)]
        return [name for name in ordered if name in found and name != "plain"]

    def plain(self, model: str) -> Line | None:
        """Return the line of the plain step."""
        return self.lines.get((model, "plain", "plain"))

    def runs(self, model: str, method: str) -> list[Line]:
        """Return what was run, by falling measured peak."""
        found = [
            line
            for (name, how, _), line in self.lines.items()
            if (name, how) == (model, method) and line["status"] == "ok"
        ]
        runs = [line for line in found if "measured_peak_bytes" in line]
        return sorted(runs, key=lambda line: -line["measured_peak_bytes"])


def networks_table(results: NetworkResults) -> str:
    """Return what each network is and what its plain step needs."""
    head = (
        "network",
        "batch",
        "ops",
        "parameters",
        "plain peak",
        "parameters and gradients",
        "plain step",
        "captured step",
    )
    rows: list[Sequence[str]] = []
    for model in results.networks:
        line = results.plain(model)
        if line is None or line["status"] != "ok":
            continue
        share = 2 * line["parameter_bytes"] / line["plain_peak_bytes"]
        differing = line["captured_differs_from_eager"]
        rows.append(
            [
                model,
                " x ".join(str(size) for size in line["image_shape"]),
                str(line["op_count"]),
                mebibytes(line["parameter_bytes"]),
                mebibytes(line["plain_peak_bytes"]),
                f"{share:.0%} of it",
                milliseconds(line["plain_ns"]),
                f"off by ≤ {differing['largest']:.0e}"
                if differing["count"]
                else "bitwise eager",
            ]
        )
    return table(head, rows)


def paper_table(results: NetworkResults) -> str:
    """Return what each method reaches within the budget that the paper's best needs."""
    head = ("network", "paper: best", "paper: Chen", *results.methods)
    rows: list[Sequence[str]] = []
    for model in results.networks:
        published = NETWORKS[model]
        limit = 1 - published.reduction_percent / 100
        rows.append(
            [
                model,
                f"-{published.reduction_percent} %",
                f"-{published.chen_percent} %",
                *(_paper_cell(results, model, how, limit) for how in results.methods),
            ]
        )
    return table(head, rows)


def _paper_cell(results: NetworkResults, model: str, method: str, limit: float) -> str:
    """Return the run at the paper's budget, or the fastest within it, or the least."""
    at_budget = results.lines.get((model, method, PAPER_CASE))
    if at_budget is not None and at_budget["status"] == "ok":
        return _reached(at_budget)
    runs = results.runs(model, method)
    within = [line for line in runs if _share(line) <= limit]
    if within:
        return _reached(min(within, key=lambda line: line["slowdown"]))
    return f"not: {_reached(runs[-1])}" if runs else ""


def smallest_table(results: NetworkResults) -> str:
    """Return the smallest measured peak of each method, beside the paper's."""
    rows: list[Sequence[str]] = []
    for model in results.networks:
        published = NETWORKS[model]
        paper = (
            published.exact_percent,
            published.approximate_percent,
            published.chen_percent,
        )
        runs = [results.runs(model, how) for how in results.methods]
        ours = [_reached(found[-1]) if found else "" for found in runs]
        rows.append([model, *(f"-{percent} %" for percent in paper), *ours])
    paper_head = ("paper: exact", "paper: approximate", "paper: Chen")
    return table(("network", *paper_head, *results.methods), rows)


def planning_table(results: NetworkResults) -> str:
    """Return the longest time that a solver took for one budget of a network."""
    methods = [how for how in results.methods if how != "checkpoint"]
    rows: list[list[str]] = []
    for model in results.networks:
        longest = [
            max((line["search_s"] for line in results.runs(model, how)), default=None)
            for how in methods
        ]
        rows.append([model, *("" if s is None else seconds(s) for s in longest)])
    return table(("network", *methods), rows)


def runs_table(results: NetworkResults) -> str:
    """Return every run: its peak, its measured and its predicted time."""
    head = (
        "network",
        "method",
        "budget",
        "measured peak",
        "of plain",
        "time",
        "predicted time",
        "pairs",
        "other load",
    )
    rows = [
        [
            model,
            method,
            mebibytes(line["budget_bytes"]) if "budget_bytes" in line else line["case"],
            mebibytes(line["measured_peak_bytes"]),
            f"{_share(line):.1%}",
            times(line["slowdown"]),
            times(line["predicted_slowdown"]) if "predicted_slowdown" in line else "",
            str(len(line["times_ns"])),
            load(line),
        ]
        for model in results.networks
        for method in results.methods
        for line in results.runs(model, method)
    ]
    return table(head, rows)


def exactness_text(results: NetworkResults) -> str:
    """Return how many planned runs were bitwise equal and within their budgets."""
    planned = [
        line
        for model in results.networks
        for method in results.methods
        for line in results.runs(model, method)
        if "budget_bytes" in line
    ]
    if not planned:
        return "No plan is recorded."
    exact = sum(not line["differs_from_captured"]["count"] for line in planned)
    kept = sum(line["is_within_budget"] for line in planned)
    worst = max(abs(line["prediction_error"]) for line in planned)
    return (
        f"Of {len(planned)} planned steps that were run, {exact} are bitwise equal to "
        f"the captured step and {kept} within their budget; predicted and measured "
        f"peak differ by {worst:.1%} at most."
    )


def setting_text(results: NetworkResults) -> str:
    """Return what the results were measured with and on."""
    lines = list(results.lines.values())
    threads = {line["machine"]["threads"] for line in lines}
    loads = [line["foreign_load"] for line in lines if line.get("foreign_load")]
    busy = (
        f" While steps were timed, other processes took {100 * min(loads):.0f} to "
        f"{100 * max(loads):.0f} % of all cores' time, "
        f"{100 * statistics.median(loads):.0f} % in the median."
        if loads
        else ""
    )
    return (
        f"{measured_on(lines)}; {'/'.join(map(str, sorted(threads)))} thread"
        f"{'' if threads == {1} else 's'}.{busy}"
    )


def _share(line: Line) -> float:
    return line["measured_peak_bytes"] / line["plain_peak_bytes"]


def _reached(line: Line) -> str:
    """Return a run's reduction, measured and predicted time, and broken promises."""
    text = f"-{100 * (1 - _share(line)):.0f} %, {times(line['slowdown'])}"
    if "predicted_slowdown" in line:
        text += f" ({times(line['predicted_slowdown'])})"
    if line.get("is_within_budget") is False:
        text += ", **over budget**"
    if line.get("differs_from_captured", {}).get("count"):
        text += ", **not exact**"
    return text


def trade_off_figure(results: NetworkResults, model: str) -> Axes | None:
    """Draw time against measured peak, one curve a method; ``None`` without any run.

    Times are measured; what plans predict of theirs, from the operators' costs, is
    drawn as open markers, since measured times are as noisy as the machine.
    """
    methods = [how for how in results.methods if results.runs(model, how)]
    if not methods:
        return None
    ax = Figure(figsize=(6.4, 4), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    for method in methods:
        colour, marker, line_style = _STYLES.get(method, _OTHER_STYLE)
        runs = list(_frontier(results.runs(model, method)))
        ax.plot(
            [100 * _share(line) for line in runs],
            [line["slowdown"] for line in runs],
            marker=marker,
            linestyle=line_style,
            color=colour,
            linewidth=1.2,
            markersize=4.5,
            label=method,
        )
        predicted = [line for line in runs if "predicted_slowdown" in line]
        if predicted:
            ax.plot(
                [100 * _share(line) for line in predicted],
                [line["predicted_slowdown"] for line in predicted],
                marker=marker,
                linestyle="",
                color=colour,
                markerfacecolor="none",
                markersize=6,
                label=f"{method}, predicted",
            )
    ax.plot(100, 1, "s", color=_GREY, label="plain")
    ax.axvline(
        100 - NETWORKS[model].reduction_percent,
        color=_GREY,
        linestyle=(0, (6, 2)),
        linewidth=1,
        label="the paper's best",
    )
    ax.set_xlim(left=0)
    ax.set_xlabel("measured peak of the whole step (% of plain)")
    ax.set_ylabel("time / plain")
    ax.set_title(model)
    ax.legend(frameon=False, fontsize="small")
    return ax


def _frontier(runs: Iterable[Line]) -> Iterator[Line]:
    """Leave out runs of a peak that was measured before."""
    seen: set[int] = set()
    for line in runs:
        if line["measured_peak_bytes"] not in seen:
            seen.add(line["measured_peak_bytes"])
            yield line


def section(results: NetworkResults) -> str:
    """Return everything that stands between the marks of the page."""
    if not results.lines:
        return "Nothing is recorded."
    failures = [
        f"- {line['model']}, {line['method']}: **{line['status']}**"
        for line in results.failures
    ]
    figures = [
        f"![{model}](images/{figure_name(model)})"
        for model in results.networks
        if any(results.runs(model, how) for how in results.methods)
    ]
    parts = [
        setting_text(results),
        exactness_text(results),
        "### The networks",
        networks_table(results),
        "### Within the budget of the paper's best",
        paper_table(results),
        "### The smallest peak, beside the paper's",
        smallest_table(results),
        "### Longest search for one plan",
        planning_table(results),
        "### Time against memory",
        "\n".join(figures),
        "### Every run",
        runs_table(results),
    ]
    if failures:
        parts += ["### What failed", "\n".join(failures)]
    return "\n\n".join(parts)


def figure_name(model: str) -> str:
    return f"lower-sets-{model}.svg"


def fill(page: str, results: NetworkResults) -> str:
    """Return a page with the marked part written anew.

    Raises
    ------
    ValueError
        If the page has not one place for it.
    """
    return fill_place(page, "lower-sets-networks", section(results))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.lower_sets_tables")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = NetworkResults(options.results)
    page = options.docs / "lower-sets.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    images = options.docs / "images"
    images.mkdir(exist_ok=True)
    for model in results.networks:
        ax = trade_off_figure(results, model)
        if ax is not None:
            save_figure(ax, images / figure_name(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
