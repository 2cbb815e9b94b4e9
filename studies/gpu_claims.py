"""What the command for a GPU claims, and whether what was measured keeps it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from studies.gpu_parts import SIMULATED, cases

Line = dict[str, Any]

KEPT, BROKEN, NOT_RUN = "kept", "broken", "not run"

SMALL_BYTES = 64 << 10
"""By how much a prediction may be off, however small the step: the allocator rounds
each tensor up, and the optimizer's are predicted together."""

_PREDICTION_PERCENT = 1
_RESERVED_PERCENT = 5
_TIME_PERCENT = 5
_BYTES_PER_S = range(10**8, 10**13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim, and what became of it.

    Parameters
    ----------
    text
        The claim.
    verdict
        :data:`KEPT`, :data:`BROKEN` or :data:`NOT_RUN`.
    why
        Which cases broke it, or why it was not run; else in how many it was kept.
    """

    text: str
    verdict: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    text: str
    part: str
    holds: Callable[[Line], bool]
    is_judged: Callable[[Line], bool] = lambda _line: True
    needs_a_card: str = ""


RULES = (
    _Rule(
        text="All tests marked `gpu` pass",
        part="tests",
        holds=lambda line: not line["failed"],
        is_judged=lambda line: bool(line["passed_count"] or line["failed"]),
    ),
    _Rule(
        text="No measured peak of a planned step is above its budget",
        part="peaks",
        holds=lambda line: line["requested_bytes"] <= line["budget_bytes"],
        is_judged=lambda line: "predicted_bytes" in line,
    ),
    _Rule(
        text="The predicted peak is within 1 % of the measured requested one, or 64 KiB",
        part="peaks",
        holds=lambda line: (
            abs(line["predicted_bytes"] - line["requested_bytes"])
            <= max(line["requested_bytes"] * _PREDICTION_PERCENT // 100, SMALL_BYTES)
        ),
        is_judged=lambda line: "predicted_bytes" in line,
    ),
    _Rule(
        text="The measured allocated peak is at most 1 % above the predicted one",
        part="peaks",
        holds=lambda line: _is_predicted(line, "allocated_bytes", _PREDICTION_PERCENT),
        is_judged=lambda line: line.get("predicted_allocated_bytes") is not None,
        needs_a_card="the model is of CUDA's allocator",
    ),
    _Rule(
        text="The measured reserved peak is at most 5 % above the predicted one",
        part="peaks",
        holds=lambda line: _is_predicted(line, "reserved_bytes", _RESERVED_PERCENT),
        is_judged=lambda line: line.get("predicted_reserved_bytes") is not None,
        needs_a_card="the model is of CUDA's allocator",
    ),
    _Rule(
        text="Planned steps are bitwise equal to the step without rematerialisation, "
        "where that repeats itself",
        part="bitwise",
        holds=lambda line: not line["differs"],
        is_judged=lambda line: not line["differs_by_itself"],
    ),
    _Rule(
        text="A recorded history of the allocator is replayed address for address",
        part="replay",
        holds=lambda line: not line["differences"],
        needs_a_card="only CUDA's allocator records one",
    ),
    _Rule(
        text="At the peak of `torch.utils.checkpoint` a step takes at most 5 % longer",
        part="time",
        holds=lambda line: _is_as_fast(line, "eager"),
        is_judged=lambda line: line["peer"] == "checkpoint",
        needs_a_card="the simulated device is no model of time",
    ),
    _Rule(
        text="At the peak of `torch.compile` with a budget a step with fused kernels "
        "takes at most 5 % longer",
        part="time",
        holds=lambda line: _is_as_fast(line, "fused"),
        is_judged=lambda line: line["peer"] != "checkpoint",
        needs_a_card="the simulated device is no model of time",
    ),
    _Rule(
        text="A step that copies to pinned memory of the host and back keeps its "
        "budget, bitwise",
        part="offload",
        holds=lambda line: (
            line["status"] == "ok"
            and bool(line["copies"])
            and line["is_within_budget"]
            and not line["differences"]
        ),
    ),
    _Rule(
        text="Links are measured",
        part="offload",
        holds=lambda line: all(
            link["bytes_per_s"] in _BYTES_PER_S for link in line["links"]
        ),
    ),
)


def _is_predicted(line: Line, what: str, percent: int) -> bool:
    """Return whether a peak is at most so many percent above its prediction."""
    return 100 * line[what] <= (100 + percent) * line[f"predicted_{what}"]


def _is_as_fast(line: Line, way: str) -> bool:
    own_ns: int | None = line.get(f"{way}_ns")
    return (
        own_ns is not None and 100 * own_ns <= (100 + _TIME_PERCENT) * line["peer_ns"]
    )


def newest(lines: Sequence[Line]) -> list[Line]:
    """Return the last line of each part, model and case, in their order."""
    found = {(li["part"], li.get("model"), li["case"]): li for li in lines}
    return list(found.values())


def claims(lines: Sequence[Line], device: str) -> list[Claim]:
    """Return what became of each claim.

    Parameters
    ----------
    lines
        All that were measured in the same way.
    device
        torch's type of the device.
    """
    found = newest(lines)
    return [
        *(_judged(rule, found, device) for rule in RULES),
        Claim(
            text="Plans run in a native interpreter and as device graphs",
            verdict=NOT_RUN,
            why="this version has neither",
        ),
    ]


def _judged(rule: _Rule, lines: Sequence[Line], device: str) -> Claim:
    if rule.needs_a_card and device == SIMULATED:
        return Claim(text=rule.text, verdict=NOT_RUN, why=rule.needs_a_card)
    # The bits are compared by the processes that measure peaks.
    part = "peaks" if rule.part == "bitwise" else rule.part
    ends = {li["case"]: li for li in lines if li["part"] == "case"}
    mine = {case: ends.get(f"{part}: {case}") for case in cases(part, device)}
    failed = [c for c, end in mine.items() if end and end["status"] == "failed"]
    short = [c for c, end in mine.items() if not end or end["status"] in _SHORT]
    judged = [li for li in lines if li["part"] == rule.part and rule.is_judged(li)]
    broken = [name_of(line) for line in judged if not rule.holds(line)]
    rest = f"; not or not fully run: {', '.join(short)}" if short else ""
    if broken or failed:
        why = [f"in {len(broken)} of {len(judged)} cases", *broken]
        why += [f"{case} failed" for case in failed]
        return Claim(text=rule.text, verdict=BROKEN, why=", ".join(why) + rest)
    if not judged:
        why = "no case was judged" + rest
        return Claim(text=rule.text, verdict=NOT_RUN, why=why)
    return Claim(
        text=rule.text,
        verdict=KEPT,
        why=f"in {len(judged)} of {len(judged)} cases{rest}",
    )


_SHORT = ("not run", "timed out")


def name_of(line: Line) -> str:
    """Return what a line is about."""
    model = line.get("model", "")
    return line["case"] if model in line["case"] else f"{model} {line['case']}"
