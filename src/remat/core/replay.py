"""The serial replay of the judge: which steps are allowed, and what memory they take.

A device's memory while a step runs is: resident bytes, plus every live storage, plus
what the step itself adds. ``Compute`` adds all its outputs and its workspace while the
inputs are still held; an output that was already live is replaced by the fresh copy
after the op, so both count during it. ``Copy`` adds the storage on the target.

What the caller holds (:attr:`remat.core.graph.TrainingGraph.held_outputs`) stays where
it was handed over, on its home, from the boundary to the end. Copies of it on other
devices are the schedule's own: they may be made and discarded at any time.
"""

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import NoReturn, assert_never

from remat.core.clock import OverlappedClock
from remat.core.graph import Op, Phase, TrainingGraph
from remat.core.platform import Platform
from remat.core.rules import MESSAGES, BrokenRuleError, Rule, Violation
from remat.core.schedule import Boundary, Compute, Copy, Discard, Step


@dataclass(slots=True)
class Replay:
    """The state of a replay; :meth:`take` its steps, then :meth:`finish`."""

    graph: TrainingGraph
    platform: Platform
    clock: OverlappedClock = field(init=False)
    step: int = 0
    is_backward: bool = False
    serial_ns: int = 0
    recomputed_ns: int = 0
    # Per device the storages with bytes there (not the residents on their home).
    live: list[set[int]] = field(default_factory=list[set[int]])
    used_bytes: list[int] = field(default_factory=list[int])
    timeline: list[list[int]] = field(default_factory=list[list[int]])
    run: set[int] = field(default_factory=set[int])
    last_ordered: int = -1
    # The external op that has run in this pass.
    caller_op: int | None = None
    over_budget: Violation | None = None

    def __post_init__(self) -> None:
        devices = range(len(self.platform.devices))
        self.clock = OverlappedClock(self.graph, self.platform)
        self.live = [set() for _ in devices]
        self.used_bytes = [self.graph.resident_bytes(d) for d in devices]
        self.timeline = [[] for _ in devices]

    def take(self, step: Step) -> None:
        """Allow and count a step, or raise for the rule that it breaks."""
        match step:
            case Compute():
                self._compute(step)
            case Discard():
                self._discard(step)
            case Copy():
                self._copy(step)
            case Boundary():
                self._boundary()
            case _:
                assert_never(step)

    def _fail(
        self,
        rule: Rule,
        *,
        op: int | None = None,
        storage: int | None = None,
        device: int | None = None,
        **words: object,
    ) -> NoReturn:
        """End the replay at a rule that is broken by this op, storage or device."""
        if op is not None:
            words["op"] = f"op {op} {self.graph.ops[op].name!r}"
        if storage is not None:
            words["storage"] = (
                f"storage {storage} {self.graph.storages[storage].name!r}"
            )
        raise BrokenRuleError(
            Violation(
                rule=rule,
                step=self.step,
                message=MESSAGES[rule].format(device=device, **words),
                op=op,
                storage=storage,
                device=device,
            )
        )

    def _check_index(self, kind: str, index: int, known: Sized) -> None:
        if not 0 <= index < len(known):
            rule, op = Rule.UNKNOWN_INDEX, index if kind == "op" else None
            message = MESSAGES[rule].format(what=f"{kind} {index}")
            violation = Violation(rule=rule, step=self.step, message=message, op=op)
            raise BrokenRuleError(violation)

    def _is_live(self, storage: int, device: int) -> bool:
        """Return whether ``storage`` may be read on ``device``."""
        block = self.graph.storages[storage]
        is_at_home = block.is_resident and block.home == device
        return is_at_home or storage in self.live[device]

    def _is_live_at_home(self, storage: int) -> bool:
        return self._is_live(storage, self.graph.storages[storage].home)

    def _record(self, extra_bytes: dict[int, int]) -> None:
        """Append the bytes during this step and note the first budget exceeded."""
        for index, device in enumerate(self.platform.devices):
            used = self.used_bytes[index] + extra_bytes.get(index, 0)
            self.timeline[index].append(used)
            limit = device.budget_bytes
            if limit is not None and used > limit and self.over_budget is None:
                self.over_budget = self.excess(index, used, limit)

    def excess(self, device: int, used: int, limit: int) -> Violation:
        """Return that a device holds more than its budget at this step."""
        name = f"{device} {self.platform.devices[device].name!r}"
        message = MESSAGES[Rule.OVER_BUDGET].format(
            device=name, used=used, excess=used - limit, limit=limit
        )
        return Violation(
            rule=Rule.OVER_BUDGET,
            step=self.step,
            message=message,
            device=device,
            excess_bytes=used - limit,
        )

    def _make_live(self, storage: int, device: int) -> None:
        if storage not in self.live[device]:
            self.used_bytes[device] += self.graph.storages[storage].size_bytes
            self.live[device].add(storage)

    def _compute(self, step: Compute) -> None:
        self._check_index("device", step.device, self.platform.devices)
        self._check_index("op", step.op, self.graph.ops)
        op = self.graph.ops[step.op]
        kind = self.graph.kind_index(self.platform.devices[step.device].kind)
        cost_ns = op.cost_ns[kind]
        if cost_ns is None:
            self._fail(Rule.CANNOT_RUN, op=step.op, on=step.device)
        self._check_may_run(step.op, op)
        for storage in op.reads:
            if not self._is_live(storage, step.device):
                where = {"storage": storage, "device": step.device}
                self._fail(Rule.READ_NOT_LIVE, op=step.op, **where)
        outputs = sum(self.graph.storages[s].size_bytes for s in op.writes)
        self._record({step.device: outputs + op.workspace_bytes[kind]})
        for storage in op.writes:
            self._make_live(storage, step.device)
        self.clock.compute(self.step, step, op, kind)
        self.serial_ns += cost_ns
        self.recomputed_ns += cost_ns if step.op in self.run else 0
        self.run.add(step.op)
        if op.is_external:
            self.caller_op = step.op

    def _check_may_run(self, index: int, op: Op) -> None:
        if op.phase is Phase.BACKWARD and not self.is_backward:
            self._fail(Rule.PHASE, op=index)
        if not op.is_external and self.caller_op is not None:
            self._fail_after_caller(f"op {index} {op.name!r}")
        if index in self.run:
            if op.non_recomputable is not None:
                self._fail(Rule.RECOMPUTED, op=index, reason=op.non_recomputable)
        elif op.is_ordered:
            if index < self.last_ordered:
                self._fail(Rule.ORDER, op=index, last=self.last_ordered)
            self.last_ordered = index

    def _fail_after_caller(self, what: str) -> NoReturn:
        self._fail(Rule.AFTER_CALLER, op=self.caller_op, what=what)

    def _discard(self, step: Discard) -> None:
        self._check_index("device", step.device, self.platform.devices)
        self._check_index("storage", step.storage, self.graph.storages)
        block = self.graph.storages[step.storage]
        is_at_home = block.home == step.device
        where = {"storage": step.storage, "device": step.device}
        if block.is_resident and is_at_home:
            self._fail(Rule.DISCARD_RESIDENT, **where)
        if step.storage not in self.live[step.device]:
            self._fail(Rule.DISCARD_NOT_LIVE, **where)
        is_held = self.is_backward and step.storage in self.graph.held_outputs
        if is_held and is_at_home:
            self._fail(Rule.DISCARD_HELD, **where, size=block.size_bytes)
        self._record({})
        self.live[step.device].remove(step.storage)
        self.used_bytes[step.device] -= block.size_bytes
        self.clock.discard(step)

    def _copy(self, step: Copy) -> None:
        for device in (step.source, step.target):
            self._check_index("device", device, self.platform.devices)
        self._check_index("storage", step.storage, self.graph.storages)
        block = self.graph.storages[step.storage]
        link = self.platform.link(step.source, step.target)
        if link is None:
            ends = {"source": step.source, "target": step.target}
            self._fail(Rule.NO_LINK, storage=step.storage, **ends)
        if self.caller_op is not None:
            self._fail_after_caller(
                f"the copy of storage {step.storage} {block.name!r}"
            )
        if not self._is_live(step.storage, step.source):
            self._fail(Rule.COPY_NOT_LIVE, storage=step.storage, device=step.source)
        if self._is_live(step.storage, step.target):
            self._fail(Rule.COPY_ALREADY_LIVE, storage=step.storage, device=step.target)
        self._record({step.target: block.size_bytes})
        self._make_live(step.storage, step.target)
        copy_ns = link.copy_ns(block.size_bytes)
        self.clock.copy(self.step, step, copy_ns)
        self.serial_ns += copy_ns

    def _boundary(self) -> None:
        if self.is_backward:
            self._fail(Rule.SECOND_BOUNDARY)
        for storage in self.graph.forward_outputs:
            if not self._is_live_at_home(storage):
                self._fail(Rule.OUTPUT_MISSING, storage=storage)
        self._check_effects(range(self.graph.forward_count))
        self.is_backward = True
        self.caller_op = None
        tangents = [(i, self.graph.storages[i]) for i in self.graph.tangents]
        appearing: dict[int, int] = {}
        for _, block in tangents:
            appearing[block.home] = appearing.get(block.home, 0) + block.size_bytes
        self._record(appearing)
        for storage, block in tangents:
            self._make_live(storage, block.home)
        self.clock.boundary(self.step)

    def finish(self) -> None:
        """Check what has to hold at the end."""
        if not self.is_backward:
            self._fail(Rule.NO_BOUNDARY)
        for storage in self.graph.final_outputs:
            if not self._is_live_at_home(storage):
                self._fail(Rule.FINAL_MISSING, storage=storage)
        self._check_effects(range(len(self.graph.ops)))

    def _check_effects(self, ops: range) -> None:
        """Check that what has an effect has happened in its own pass."""
        for index in ops:
            op = self.graph.ops[index]
            if (op.is_ordered or not op.writes) and index not in self.run:
                self._fail(Rule.EFFECT_MISSING, op=index)
