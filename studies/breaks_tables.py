"""Tables of the studies of many models and of peers on models that break the graph."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies.definitions import definitions
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, latest, measured_on, read
from studies.tables import gradients, mebibytes, table, times

Line = dict[str, Any]
PAGE = ROOT / "docs" / "studies.md"


COLUMNS = (
    "model",
    "source",
    "graphs",
    "plain peak",
    "without recomputation",
    "measured peak",
    "of plain",
    "predicted less measured",
    "planned in",
    "recomputation",
    "against eager",
)
"""Plain is eager PyTorch as measured; *without recomputation* is what the plan says of
its own step that keeps all, over that: above 1, remat would waste memory unseen."""


def fill_page(results: Path = RESULTS) -> None:
    """Write every table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, write in TABLES.items():
        page = fill_place(page, name, write(results))
    PAGE.write_text(page, encoding="utf-8")


def newest(results: Path) -> list[Line]:
    """Return the last line of each definition, in the order of the definitions."""
    found = {line["name"]: line for line in read(results / "many_models.jsonl")}
    return [found[name] for name in definitions() if name in found]


def counts_table(results: Path) -> str:
    """Return how many models of each library ended how."""
    lines = newest(results)
    counted = Counter((line["library"], line["status"]) for line in lines)
    statuses = list(dict.fromkeys(line["status"] for line in lines))
    libraries = list(dict.fromkeys(line["library"] for line in lines))
    rows = [
        [library, *(str(counted[library, status]) for status in statuses)]
        for library in libraries
    ]
    total = [str(sum(c for (_, s), c in counted.items() if s == st)) for st in statuses]
    return table(["library", *statuses], [*rows, ["all", *total]])


def models_table(results: Path) -> str:
    """Return what became of each model."""
    return table(COLUMNS, [_model_row(line) for line in newest(results)])


def _model_row(line: Line) -> Sequence[str]:
    regions = {"whole": "one", "breaks": "several"}.get(line.get("regions", ""), "")
    source = f"{line['library']}: {definitions()[line['name']].source}"
    row = [line["name"], source, regions]
    if "measured_peak_bytes" not in line:
        return [*row, f"**{line['status']}**", *[""] * (len(COLUMNS) - 4)]
    peak_bytes, plain_bytes = line["measured_peak_bytes"], line["plain_peak_bytes"]
    kept_bytes = line.get("baseline_peak_bytes")
    share = f"{peak_bytes / plain_bytes:.0%}"
    if line["status"] != "trained":
        share += ", the smallest budget" if "at_smallest" in line else ""
    return [
        *row,
        mebibytes(plain_bytes),
        # Older lines do not say it.
        "" if kept_bytes is None else f"{kept_bytes / plain_bytes:.3f}",
        mebibytes(peak_bytes),
        share,
        f"{100 * line['prediction_error']:+.2f} %",
        f"{line['planning_s']:.1f} s",
        f"{100 * line['overhead']:.1f} %",
        _against(line["against_eager"]),
    ]


def _against(differences: Line) -> str:
    count = differences["count"]
    return f"{count} differ by {differences['largest']:.1g}" if count else "bitwise"


def refusals_list(results: Path) -> str:
    """Return what is said where a model is refused, or failed."""
    lines = [line for line in newest(results) if "measured_peak_bytes" not in line]
    said = [f"- **{line['name']}**: {_message(line)}" for line in lines]
    return "\n".join(said) or "None."


def _message(line: Line) -> str:
    text = line["message"].replace(f"{ROOT}/", "").replace("<", "&lt;")
    return f"{line['status']}: {' '.join(text.split())}"


def peers_table(results: Path) -> str:
    """Return each way on each model."""
    lines = latest(read(results / "peers_breaks.jsonl"))
    head = ("model", "way", "plain peak", "peak", "of plain", "time", "gradients")
    rows = [_peer_row(line) for line in lines.values()]
    return table(head, rows)


def _peer_row(line: Line) -> Sequence[str]:
    row = [line["model"], line["case"]]
    if line["status"] == "failed" or line["status"] == "timed out":
        return [*row, f"**{line['status']}**", *[""] * 4]
    row += [mebibytes(line["plain_peak_bytes"])]
    if line["status"] == "refused":
        needed = f"refused, needs {mebibytes(line['required_bytes'])}"
        return [*row, needed, *[""] * 3]
    share = line["measured_peak_bytes"] / line["plain_peak_bytes"]
    return [
        *row,
        mebibytes(line["measured_peak_bytes"]),
        f"{share:.0%}",
        times(line["slowdown"]),
        gradients(line),
    ]


def setting(results: Path) -> str:
    """Return what the models were measured on."""
    lines = newest(results)
    libraries = sorted({line["versions_of"] for line in lines if "versions_of" in line})
    return f"{measured_on(lines)}; {', '.join(libraries)}." if lines else "Nothing."


TABLES: dict[str, Callable[[Path], str]] = {
    "many-models-setting": setting,
    "many-models-counts": counts_table,
    "many-models": models_table,
    "many-models-refusals": refusals_list,
    "peers-breaks": peers_table,
}
