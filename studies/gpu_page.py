"""The tables of what the command for a GPU measured, as Markdown.

``python -m studies.gpu_page`` writes those of ``studies/results/gpu.jsonl`` into
``docs/gpu.md``.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remat.core.units import format_bytes, format_ns
from studies.gpu_claims import NOT_RUN, claims, newest
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, measured_on, read
from studies.tables import table, times

Line = dict[str, Any]

FILE = RESULTS / "gpu.jsonl"
PAGE = ROOT / "docs" / "gpu.md"


def page(lines: Sequence[Line]) -> str:
    """Return all tables of lines that were measured in the same way."""
    devices = [line for line in lines if line["part"] == "device"]
    if not devices:
        return "Nothing is recorded."
    found = newest(lines)
    parts = [
        setting(devices[-1], lines),
        claims_table(lines),
        *(
            f"### {title}\n\n{written}"
            for title, part, write in TABLES
            if (written := write([li for li in found if li["part"] == part]))
        ),
    ]
    return "\n\n".join(parts)


def setting(device: Line, lines: Sequence[Line]) -> str:
    """Return what was measured on, and with what."""
    memory = device["memory_bytes"]
    facts = [
        device["device"]["name"],
        *([format_bytes(memory)] if memory else []),
        f"CUDA {device['cuda']}" if device["cuda"] else "without CUDA",
        f"scale {device['settings']['scale']}"
        + (", the small variants" if device["settings"]["tiny"] else ""),
        ("with" if device["has_native_core"] else "**without**") + " the native core",
        *(f"{name} is not installed" for name in device["absent"]),
    ]
    sources = {line["source"]: line["commit"] or "no commit" for line in lines}
    built_of = "; ".join(f"{c[:10]}, sources {s}" for s, c in sources.items())
    return f"{'; '.join(facts)}. {measured_on(lines)}; {built_of}."


def claims_table(lines: Sequence[Line]) -> str:
    """Return every claim, kept or broken or not run."""
    rows = [
        [
            claim.text,
            claim.verdict if claim.verdict in {"kept", NOT_RUN} else "**broken**",
            claim.why,
        ]
        for claim in claims(lines, lines[0]["device"]["type"])
    ]
    return table(("claim", "is", "cases, and why"), rows)


def _tests(lines: Sequence[Line]) -> str:
    rows = [
        [
            f"`{line['case']}`",
            str(line["passed_count"]),
            ", ".join(map(_last, line["failed"])) or "0",
            ", ".join(sorted(set(line["skipped"].values()))) or "0",
        ]
        for line in lines
    ]
    return _table(("file", "passed", "failed", "skipped"), rows)


def _last(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def _peaks(lines: Sequence[Line]) -> str:
    rows: list[Sequence[str]] = []
    for line in lines:
        model, case = line["model"], line["case"]
        if line["status"] == "refused":
            rows.append([model, case, _refused(line), *[""] * 8])
            continue
        budget = format_bytes(line["budget_bytes"]) if "budget_bytes" in line else ""
        rows.append(
            [
                model,
                case,
                budget,
                _bytes(line.get("predicted_bytes")),
                _bytes(line["requested_bytes"]),
                _error(line.get("predicted_bytes"), line["requested_bytes"]),
                _bytes(line.get("predicted_allocated_bytes")),
                _bytes(line["allocated_bytes"]),
                _bytes(line.get("predicted_reserved_bytes")),
                _bytes(line["reserved_bytes"]),
                _bytes(line["held_bytes"]),
            ]
        )
    head = (
        *("model", "budget", "bytes", "predicted", "requested", "off by"),
        *("predicted allocated", "allocated", "predicted reserved", "reserved"),
        "held by libraries",
    )
    return _table(head, rows)


def _bytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)


def _error(predicted: int | None, measured: int) -> str:
    return "" if predicted is None else f"{100 * (predicted / measured - 1):+.3f} %"


def _bitwise(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["model"],
            line["case"],
            str(line["compared_count"]),
            *(
                str(len(line[key]))
                for key in ("differs", "differs_by_itself", "differs_from_eager")
            ),
        ]
        for line in lines
    ]
    head = (
        *("model", "budget", "tensors", "differ from the captured step"),
        *("of two captured steps", "from eager PyTorch"),
    )
    return _table(head, rows)


def _replay(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["case"],
            str(line["request_count"]),
            str(line["call_count"]),
            _bytes(line["reserved_bytes"]),
            "; ".join(line["differences"]) or "none",
        ]
        for line in lines
    ]
    head = ("step, allocator", "requests", "calls", "reserved", "differences")
    return _table(head, rows)


def _times(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["model"],
            line["peer"],
            format_ns(line["plain_ns"]),
            _bytes(line["plain_peak_bytes"]),
            _bytes(line["peer_peak_bytes"]),
            times(line["peer_slowdown"]),
            *(_way(line, way) for way in ("eager", "fused")),
        ]
        for line in lines
    ]
    head = (
        *("model", "peer", "eager step", "its peak", "peer: peak", "time"),
        *("remat at that peak", "with fused kernels"),
    )
    return _table(head, rows)


def _way(line: Line, way: str) -> str:
    if way not in line:
        return ""
    if f"{way}_slowdown" not in line:
        return _refused(line[way])
    return f"{times(line[f'{way}_slowdown'])}, {_bytes(line[way]['peak_bytes'])}"


def _refused(line: Line) -> str:
    smallest = line["smallest_bytes"]
    known = "not known" if smallest is None else format_bytes(smallest)
    return f"refused; smallest {known}"


def _offload(lines: Sequence[Line]) -> str:
    rows: list[Sequence[str]] = []
    for line in lines:
        links = ", ".join(
            f"{link['bytes_per_s'] / 1e9:.1f} GB/s" for link in line["links"]
        )
        row = [line["case"], _bytes(line["predicted_plain_peak_bytes"]), links]
        if line["status"] != "ok":
            rows.append([*row, line["status"], *[""] * 4])
            continue
        card, host = line["devices"]
        rows.append(
            [
                *row,
                _bytes(card["budget_bytes"]),
                _bytes(card["measured_bytes"]),
                _bytes(host["measured_bytes"]),
                str(len(line["differences"])),
                times(line["slowdown"]),
            ]
        )
    head = (
        *("step", "plain peak", "links out, back", "budget", "peak", "pinned"),
        *("tensors that differ", "time"),
    )
    return _table(head, rows)


def _ends(lines: Sequence[Line]) -> str:
    rows = [
        [line["case"], line["status"], _said(line.get("message", ""))]
        for line in lines
        if line["status"] != "ok"
    ]
    return _table(("case", "is", "and says"), rows)


def _said(message: str) -> str:
    return " ".join(message.split())[-300:].replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    return table(head, found) if found else ""


TABLES: tuple[tuple[str, str, Callable[[Sequence[Line]], str]], ...] = (
    ("Tests", "tests", _tests),
    ("Peaks", "peaks", _peaks),
    ("Bits", "bitwise", _bitwise),
    ("Allocator", "replay", _replay),
    ("Time at equal peak", "time", _times),
    ("Pinned memory of the host", "offload", _offload),
    ("Not run, or not to the end", "case", _ends),
)


def recorded() -> str:
    """Return the tables of what the repository holds of a card.

    Of one kind of card, by one version of torch; each case as it was measured last.
    """

    def kind(line: Line) -> list[object]:
        return [line["device"], line["settings"], line["versions"]["torch"]]

    lines = read(FILE)
    devices = [line for line in lines if line["part"] == "device"]
    return page([li for li in lines if kind(li) == kind(devices[-1])])


def main() -> int:
    """Write the tables into the documentation."""
    text = fill_place(PAGE.read_text(encoding="utf-8"), "gpu", recorded())
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
