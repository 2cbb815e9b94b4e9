"""Tables and figures of the documentation from the recorded results; runs no model.

``python -m studies.tables`` rewrites what stands between the ``<!-- name -->`` and
``<!-- end name -->`` lines of ``docs/studies.md``, and the figures beside it.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat.report.figures import save_figure
from studies.pages import fill_place
from studies.peers import AOT, CASES, family
from studies.record import RESULTS, ROOT, latest, measured_on, read
from studies.run import MODELS

Line = dict[str, Any]
_TITLES = {AOT: "aot_eager"}
_MARKERS = {"checkpoint": "^", AOT: "x", "inductor": "+"}
_COLOURS = {"checkpoint": "#d55e00", AOT: "#e69f00", "inductor": "#009e73"}


class Results:
    """The newest line of every model and case.

    Parameters
    ----------
    folder
        Where the ``.jsonl`` files are.
    """

    def __init__(self, folder: Path) -> None:
        self.budgets = latest(full_size(read(folder / "budgets.jsonl")))
        self.overhead = latest(full_size(read(folder / "overhead.jsonl")))
        self.peers = latest(full_size(read(folder / "peers.jsonl")))
        self.fused = {
            (line["model"], line["case"]): line
            for line in read(folder / "fused_kernels.jsonl")
            if not line["tiny"]
        }

    def all(self) -> list[Line]:
        """Return every line, but for those of fused kernels."""
        return [
            *self.budgets.values(),
            *self.overhead.values(),
            *self.peers.values(),
        ]

    def planned(self, model: str) -> list[Line]:
        """Return the runs of remat on a model, by increasing measured peak."""
        groups = (self.budgets, self.overhead, self.peers)
        lines = [
            line
            for group in groups
            for (name, case), line in group.items()
            if name == model
            and line["status"] == "ok"
            and case not in {"plain", *CASES}
        ]
        return sorted(lines, key=lambda line: line["measured_peak_bytes"])

    def peer_lines(self, model: str) -> list[Line]:
        """Return the runs of peers on a model, in the order in which they are run."""
        found = [self.peers.get((model, case)) for case in CASES]
        return [line for line in found if line is not None]


def full_size(lines: Iterable[Line]) -> list[Line]:
    """Leave out the small variants of models."""
    return [line for line in lines if not line["settings"]["model"]["tiny"]]


def budgets_table(results: Results) -> str:
    """Return every model at every budget."""
    head = (
        "model",
        "ops",
        "plain peak",
        "budget",
        "measured peak",
        "kept",
        "predicted less measured",
        "captured",
        "eager",
        "time",
        "predicted time",
        "gap",
        "solver",
    )
    rows: list[Sequence[str]] = []
    for (_, case), line in in_order(results.budgets):
        if case == "plain":
            continue
        if line["status"] != "ok":
            rows.append([*_failed_budget(line), *[""] * (len(head) - 5)])
            continue
        rows.append(
            [
                line["model"],
                str(line["op_count"]),
                mebibytes(line["plain_peak_bytes"]),
                f"{case}: {mebibytes(line['budget_bytes'])}",
                mebibytes(line["measured_peak_bytes"]),
                "yes" if line["is_within_budget"] else "**no**",
                f"{100 * line['prediction_error']:+.3f} %",
                equality(line["differs_from_captured"]),
                equality(line["differs_from_eager"]),
                times(line["slowdown"]),
                times(line["predicted_slowdown"]),
                f"{100 * line['gap']:.1f} %",
                line["solver"],
            ]
        )
    return table(head, rows)


def _failed_budget(line: Line) -> list[str]:
    refused = f"refused; floor {mebibytes(line['floor_bytes'])}"
    is_refused = line["status"] == "below floor"
    return [
        line["model"],
        "",
        mebibytes(line["plain_peak_bytes"]) if "plain_peak_bytes" in line else "",
        f"{line['case']}: {mebibytes(line['budget_bytes'])}" if is_refused else "",
        refused if is_refused else f"**{line['status']}**",
    ]


def planning_table(results: Results) -> str:
    """Return the seconds of planning: the first budget measures the operators too."""
    head = ("model", "ops", "first plan", "capture", "profile", "solve", "later plans")
    rows: list[Sequence[str]] = []
    for model in MODELS:
        lines = [
            line
            for (name, case), line in in_order(results.budgets)
            if name == model and case != "plain" and line["status"] != "failed"
        ]
        if not lines:
            continue
        first = max(lines, key=lambda line: line["profile_s"])
        later = [line["planning_s"] for line in lines if line is not first]
        count = max(line.get("op_count", 0) for line in lines)
        rows.append(
            [
                model,
                str(count),
                seconds(first["planning_s"]),
                seconds(first["capture_s"]),
                seconds(first["profile_s"]),
                seconds(first["solve_s"]),
                f"{seconds(min(later))} to {seconds(max(later))}" if later else "",
            ]
        )
    return table(head, rows)


def overhead_table(results: Results) -> str:
    """Return the step time with a budget of 100 % over that of the plain step."""
    head = (
        "model",
        "budget",
        "measured peak",
        "plain step",
        "planned step",
        "ratio",
        "recomputed ops",
        "pairs",
        "other load",
    )
    rows = [
        [
            line["model"],
            mebibytes(line["budget_bytes"]),
            mebibytes(line["measured_peak_bytes"]),
            milliseconds(line["plain_ns"]),
            milliseconds(line["time_ns"]),
            times(line["slowdown"]),
            str(line["recomputed_op_count"]),
            str(len(line["times_ns"])),
            load(line),
        ]
        for _, line in in_order(results.overhead)
        if line["status"] == "ok"
    ]
    return table(head, rows)


def peers_table(results: Results) -> str:
    """Return each peer beside the fastest run of remat that needs no more memory."""
    head = (
        "model",
        "peer",
        "peak",
        "of plain",
        "time",
        "gradients",
        "buffers",
        "remat: peak",
        "time",
        "remat is",
        "fused / peer",
    )
    rows: list[Sequence[str]] = []
    for model in MODELS:
        for line in results.peer_lines(model):
            if line["status"] != "ok":
                rows.append([model, title(line["case"]), line["status"], *[""] * 8])
                continue
            fused = results.fused.get((model, line["case"]), {})
            ratio = fused.get("fused_over_peer")
            beside = "" if ratio is None else f"{ratio:.2f}"
            rows.append([*_peer_row(line, results.planned(model)), beside])
    return table(head, rows)


def _peer_row(line: Line, planned: Sequence[Line]) -> Sequence[str]:
    peak_bytes = line["measured_peak_bytes"]
    fitting = [run for run in planned if run["measured_peak_bytes"] <= peak_bytes]
    best = min(fitting, key=lambda run: run["slowdown"], default=None)
    row = [
        line["model"],
        title(line["case"]),
        mebibytes(peak_bytes),
        f"{peak_bytes / line['plain_peak_bytes']:.0%}",
        times(line["slowdown"]),
        gradients(line),
        buffers(line),
    ]
    if best is None:
        return [*row, "none so low", "", ""]
    return [
        *row,
        mebibytes(best["measured_peak_bytes"]),
        times(best["slowdown"]),
        "ahead" if best["slowdown"] <= line["slowdown"] else "slower",
    ]


def setting_text(results: Results) -> str:
    """Return what the results were measured with and on."""
    lines = results.all()
    if not lines:
        return "Nothing is recorded."
    newest = max(lines, key=lambda line: line["date"])
    machine = newest["machine"]
    commits = {line["commit"][:10] for line in lines if line["commit"]}
    return (
        f"{measured_on(lines)}; {machine['cores']} cores, {machine['threads']} "
        f"threads, {mebibytes(machine['memory_bytes'])} of memory; "
        f"{len(commits)} commits, the last {newest['commit'][:10]}. Each line of the "
        "results names its own."
    )


def trade_off_figure(results: Results, model: str) -> Axes | None:
    """Draw measured time against measured peak, or return ``None`` without results."""
    planned = results.planned(model)
    if not planned:
        return None
    plain_bytes = planned[0]["plain_peak_bytes"]
    ax = Figure(figsize=(6, 3.6), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.plot(
        [line["measured_peak_bytes"] / plain_bytes for line in planned],
        [line["slowdown"] for line in planned],
        "o-",
        color="#0072b2",
        linewidth=1.3,
        markersize=4,
        label="remat",
    )
    ax.plot(1, 1, "s", color="#7f7f7f", label="plain eager")
    for name, marker in _MARKERS.items():
        points = [
            (line["measured_peak_bytes"] / line["plain_peak_bytes"], line["slowdown"])
            for line in results.peer_lines(model)
            if line["status"] == "ok" and family(line["case"]) == name
        ]
        if points:
            ax.plot(
                [memory for memory, _ in points],
                [slowdown for _, slowdown in points],
                marker,
                color=_COLOURS[name],
                label=title(name),
            )
    ax.set_xlim(left=0)
    ax.set_xlabel("measured peak of the whole step / plain eager")
    ax.set_ylabel("time / plain eager")
    ax.set_title(model)
    ax.legend(frameon=False, fontsize="small")
    return ax


def title(case: str) -> str:
    """Return a short name of a peer."""
    name, at, budget = case.partition("@")
    return f"{_TITLES.get(name, name)}{' ' if at else ''}{budget}"


def in_order(lines: dict[tuple[str, str], Line]) -> list[tuple[tuple[str, str], Line]]:
    """Return lines by model, then by decreasing budget."""

    def rank(item: tuple[tuple[str, str], Line]) -> tuple[int, float]:
        (model, case), line = item
        position = MODELS.index(model) if model in MODELS else len(MODELS)
        return position, 0 if case == "plain" else -line.get("budget_bytes", 0)

    return sorted(lines.items(), key=rank)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    body = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in body)


def equality(differences: Line) -> str:
    count = differences["count"]
    if not count:
        return "bitwise"
    return f"{count} differ by ≤ {differences['largest']:.1g}"


def gradients(line: Line) -> str:
    """Return how far gradients are from those of eager PyTorch."""
    if not line["differing_gradient_count"]:
        return "bitwise"
    if "overall_gradient_error" in line:
        return f"off by {line['overall_gradient_error']:.1g}"
    return f"off by {line['gradient_error']:.1g} (worst)"


def buffers(line: Line) -> str:
    """Return whether statistics are those of eager PyTorch."""
    if not line["differing_buffer_count"]:
        return "bitwise"
    is_counted_twice = any("num_batches" in name for name in line["differing_buffers"])
    return "**moved twice**" if is_counted_twice else "last digits"


def load(line: Line) -> str:
    share = line["foreign_load"]
    return "" if share is None else f"{100 * share:.0f} %"


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:.0f} ms"


def seconds(duration_s: float) -> str:
    return f"{duration_s:.1f} s"


def times(ratio: float) -> str:
    return f"{ratio:.2f} x"


TABLES: dict[str, Callable[[Results], str]] = {
    "setting": setting_text,
    "budgets": budgets_table,
    "planning": planning_table,
    "overhead": overhead_table,
    "peers": peers_table,
}


def fill(page: str, results: Results) -> str:
    """Return a page with every marked part written anew.

    Raises
    ------
    ValueError
        If the page has not one place for each of the tables.
    """
    for name, write in TABLES.items():
        page = fill_place(page, name, write(results))
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.tables")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = Results(options.results)
    page = options.docs / "studies.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    images = options.docs / "images"
    images.mkdir(exist_ok=True)
    for model in MODELS:
        ax = trade_off_figure(results, model)
        if ax is not None:
            save_figure(ax, images / f"study-{model}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
