"""The rules of schedules, and what is said of the first one that is broken."""

from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """The rules that a schedule can break."""

    UNKNOWN_INDEX = "a step names an op, storage or device that does not exist"
    READ_NOT_LIVE = "an op reads a storage that is not live on its device"
    CANNOT_RUN = "an op has no cost on that device kind"
    PHASE = "a backward op runs before the boundary"
    RECOMPUTED = "an op that may run only once runs twice"
    ORDER = "ordered ops run first in another order than the graph's"
    AFTER_CALLER = "something runs after the caller's own work in the same pass"
    DISCARD_NOT_LIVE = "a discarded storage is not live on that device"
    DISCARD_RESIDENT = "a resident storage is discarded"
    DISCARD_HELD = "what the caller holds since the boundary is discarded on its home"
    COPY_NOT_LIVE = "a copied storage is not live on the source"
    COPY_ALREADY_LIVE = "a copied storage is already live on the target"
    NO_LINK = "no link joins the two devices of a copy"
    SECOND_BOUNDARY = "there is more than one boundary"
    OUTPUT_MISSING = "a forward output is not live at the boundary"
    NO_BOUNDARY = "there is no boundary"
    FINAL_MISSING = "a final output is not live at the end"
    EFFECT_MISSING = "an ordered op or an op without outputs has not run in its pass"
    OVER_BUDGET = "more bytes are live than the device's budget"


MESSAGES = {
    Rule.UNKNOWN_INDEX: "{what} does not exist",
    Rule.READ_NOT_LIVE: "{op} reads {storage}, which is not live on device {device}",
    Rule.CANNOT_RUN: "{op} cannot run on device {on}",
    Rule.PHASE: "{op} runs before the boundary",
    Rule.RECOMPUTED: "{op} runs again, but {reason}",
    Rule.ORDER: "{op} first runs after op {last}",
    Rule.AFTER_CALLER: (
        "{what} comes after {op}, which the caller does when the pass has ended"
    ),
    Rule.DISCARD_NOT_LIVE: "{storage} is not live on device {device}",
    Rule.DISCARD_RESIDENT: "{storage} is resident",
    Rule.DISCARD_HELD: (
        "{storage} was handed over at the boundary, and the caller's reference keeps its "
        "{size:_} bytes on device {device} until the end"
    ),
    Rule.COPY_NOT_LIVE: "{storage} is not live on device {device}",
    Rule.COPY_ALREADY_LIVE: "{storage} is already live on device {device}",
    Rule.NO_LINK: "no link from device {source} to {target}",
    Rule.SECOND_BOUNDARY: "the boundary was passed before",
    Rule.OUTPUT_MISSING: "forward output {storage} is not live",
    Rule.NO_BOUNDARY: "the schedule ends before the boundary",
    Rule.FINAL_MISSING: "final output {storage} is not live",
    Rule.EFFECT_MISSING: "{op} has not run in its pass",
    Rule.OVER_BUDGET: (
        "device {device} holds {used:_} bytes, {excess:_} more than its budget of "
        "{limit:_}"
    ),
}
"""What a violation says of the op, storage or device that breaks the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The first rule that a schedule breaks, with where and by how much.

    ``step`` is the index of the step, or the number of steps for a rule about the
    end. Where a budget is exceeded only as steps overlap, it is that of the step that
    takes the bytes with which it is exceeded first. ``excess_bytes`` is how far over
    the budget the device is at most, else 0.
    """

    rule: Rule
    step: int
    message: str
    op: int | None = None
    storage: int | None = None
    device: int | None = None
    excess_bytes: int = 0

    def __str__(self) -> str:
        return f"step {self.step}: {self.message} ({self.rule})"


class BrokenRuleError(Exception):
    """Ends a replay; :func:`remat.core.simulator.simulate` returns what it holds."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation
