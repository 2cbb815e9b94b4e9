"""The figure and the tables of what :mod:`studies.joins` recorded."""

from collections.abc import Iterator, Sequence
from typing import Any

from remat.solvers import SOLVERS
from studies.join_networks import JOINS
from studies.record import RESULTS, ROOT, read

FILE = RESULTS / "joins.jsonl"
FIGURE = ROOT / "docs" / "images" / "joins-overhead.svg"
PAGE = ROOT / "docs" / "chains" / "measured.md"
SHOWN = {solver.__name__: f"`{name}`" for name, solver in SOLVERS.items()}

Line = dict[str, Any]


def draw() -> None:
    """Draw overhead against memory: branches together and with fixed shares."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    lines = judged_lines()
    names = [name for name in JOINS if any(line["model"] == name for line in lines)]
    figure, rows = plt.subplots(
        1,
        len(names),
        figsize=(4 * len(names), 3.4),
        squeeze=False,
        layout="constrained",
    )
    labels = {
        "split_ns": "a fixed share for each branch",
        "together_ns": "branches together",
        "solver_ns": "solver 'join'",
    }
    for ax, name in zip(rows[0], names, strict=True):
        found = [line for line in lines if line["model"] == name]
        for key, label in labels.items():
            points = [
                (line["budget_bytes"] / line["plain_peak_bytes"], line[key])
                for line in found
                if line[key] is not None
            ]
            least = found[0]["least_ns"]
            ax.plot(
                [100 * share for share, _ in points],
                [100 * (cost / least - 1) for _, cost in points],
                marker=".",
                label=label,
            )
        ax.set_title(name)
        ax.set_xlabel("budget, % of the plain peak")
        ax.grid(visible=True, alpha=0.3)
    rows[0][0].set_ylabel("more time than the plain step, %")
    rows[0][0].legend(fontsize="small")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "remat"}):
        figure.savefig(FIGURE, metadata={"Date": None})


def write_tables() -> None:
    """Write the tables of the page between the marks it has for them."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in (("measured", measured_rows()), ("curves", curve_rows())):
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n\n" + "\n".join(rows) + f"\n\n{end}{after}"
    PAGE.write_text(text, encoding="utf-8")


def measured_rows() -> Iterator[str]:
    """Yield the table of what was trained."""
    yield (
        "| model | checkpointing | peak | time | solver | peak | within | time | "
        "over checkpointing | bitwise |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    # The last line of each case counts.
    found = {
        (
            line["model"],
            line.get("peer", ""),
            "auto" if is_auto(line) else "method",
        ): line
        for line in read(FILE)
        if line["study"] == "measured" and not line["tiny"]
    }
    for (model, peer, _), line in found.items():
        theirs = [peer, *_peak_and_time(line, "peer_peak_bytes", "peer_slowdown")]
        if line["status"] != "ok":
            yield _row([model, *theirs, line["solver"], line["status"], *[""] * 4])
            continue
        if line["differs_from_eager"]:
            bitwise = (
                "planned = captured" if not line["differs_from_captured"] else "no"
            )
        else:
            bitwise = "yes"
        ours = _peak_and_time(line, "measured_peak_bytes", "slowdown")
        ratio = line.get("time_over_peer")
        solver = SHOWN.get(line["solver"], str(line["solver"]))
        yield _row(
            [
                model,
                *(theirs if peer else ["none", "", ""]),
                f"`auto`: {solver}" if is_auto(line) else solver,
                ours[0],
                "yes" if line["is_within_budget"] else "**no**",
                ours[1],
                "" if ratio is None else f"{ratio:.2f}",
                bitwise,
            ]
        )


def is_auto(line: Line) -> bool:
    """Whether a line is of the portfolio."""
    return len(line["candidates"]) > 1 if line["status"] == "ok" else False


def curve_rows() -> Iterator[str]:
    """Yield the table of the curves: overheads at budgets of the judged schedules."""
    yield "| model | budget, of plain | fixed shares | together | solver `join` |"
    yield "| --- | --- | --- | --- | --- |"
    for line in judged_lines():
        share = line["budget_bytes"] / line["plain_peak_bytes"]
        values = (line[key] for key in ("split_ns", "together_ns", "solver_ns"))
        shown = (
            "impossible" if v is None else f"{100 * (v / line['least_ns'] - 1):.1f} %"
            for v in values
        )
        yield _row([line["model"], f"{share:.0%}", *shown])


def judged_lines() -> list[Line]:
    """Return the newest judged curve of each model."""
    lines = [line for line in read(FILE) if line.get("curve") == "judged"]
    newest = {line["model"]: line["commit"] for line in lines}
    return [line for line in lines if line["commit"] == newest[line["model"]]]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _peak_and_time(line: Line, peak: str, slowdown: str) -> tuple[str, str]:
    if peak not in line:
        return "", ""
    time_shown = f"{line[slowdown]:.2f} x" if slowdown in line else ""
    return f"{line[peak] / 2**20:.1f} MiB", time_shown
