"""Notice forward passes that run before the backward passes of others.

A plan counts what one forward pass saves, or what as many do as were said to be in
flight. What others have saved is in memory besides.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.capture.surroundings import tensors_in
from remat.core.in_flight import (
    beside_bytes,
    others_bytes,
    saved_bytes,
    with_others,
)
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.core.units import format_bytes
from remat.planning.plan import Plan


@dataclass(eq=False, slots=True, weakref_slot=True)
class Pass:
    """A forward pass whose backward pass has not begun."""

    saved_bytes: int


class PassesInFlight:
    """The forward passes of a model whose backward passes have not begun.

    A pass ends when its backward pass begins, or when nobody can call that any more.

    Parameters
    ----------
    name
        The model's class, for messages.
    tell
        Called with a warning where passes in flight do not fit the budget.
    is_plannable
        Whether passes in flight can be planned for, as the model is planned.
    cure
        What to do where they cannot.
    passes
        Where passes are, with those of others that are in the same memory.
    """

    def __init__(
        self,
        name: str,
        tell: Callable[[str], None],
        *,
        is_plannable: bool,
        cure: str = "Put the calls into one module with one forward",
        passes: "weakref.WeakSet[Pass] | None" = None,
    ) -> None:
        self.name = name
        self.is_plannable = is_plannable
        self.cure = cure
        self.tell = tell
        # Autograd's nodes hold them.
        self._passes: weakref.WeakSet[Pass] = (
            weakref.WeakSet() if passes is None else passes
        )
        # Per plan, what a pass saves; with the plan, so that its number stays its own.
        self._saved: dict[int, tuple[Plan, int]] = {}
        # The same with what it needs beside others: in each step the same is asked.
        self._needed: dict[tuple[int, int, int], tuple[Plan, int]] = {}
        # Beside how many passes one was told not to fit: sizes vary in each step.
        self._told: set[int] = set()

    def __len__(self) -> int:
        return len(self._passes)

    def note(self, outputs: Any, plan: Plan) -> None:
        """Take note of a forward pass that has returned.

        Outputs in objects that hide them are not followed.
        """
        # Of several graphs, outputs have nodes of their own.
        made_by = {tensor.grad_fn for tensor in tensors_in(outputs)}
        nodes = [node for node in made_by if node is not None]
        if not nodes or plan.has_several_devices:
            return
        self._check(plan)
        begun = Pass(self._saved_bytes(plan))
        passes = self._passes
        passes.add(begun)
        for node in nodes:
            node.register_prehook(lambda _gradients: passes.discard(begun))

    def _check(self, plan: Plan) -> None:
        """Warn, once for each count of them, if others do not fit beside a pass."""
        count = len(self._passes)
        if not count or count in self._told or plan.budget_bytes is None:
            return
        held_bytes = sum(each.saved_bytes for each in self._passes)
        # Of the average size, as passes may be of any.
        taken_bytes = beside_bytes(plan.graph, -(-held_bytes // count), count + 1)
        needed_bytes = plan.peak_bytes - others_bytes(plan.graph) + taken_bytes
        if needed_bytes > plan.budget_bytes:
            needed_bytes = self._needed_bytes(plan, taken_bytes, count + 1)
        if needed_bytes > plan.budget_bytes:
            self._told.add(count)
            self.tell(
                f"{count + 1} forward passes of {self.name} ran before a backward pass, "
                f"and its plan counts {plan.in_flight}"
                f"{' that are alike' if count < plan.in_flight else ''}: what the others "
                f"have saved is in memory too, {format_bytes(needed_bytes)} in all, above "
                f"the budget of {format_bytes(plan.budget_bytes)}. "
                f"{self._cure(plan, count, needed_bytes - plan.budget_bytes)}, or call "
                "backward after each forward pass"
            )

    def _needed_bytes(self, plan: Plan, taken_bytes: int, in_flight: int) -> int:
        """Return the peak of a pass beside others, as the judge finds it.

        What the optimizer needs may be where passes were that are over by then.
        """
        key = id(plan), taken_bytes, in_flight
        if key not in self._needed:
            graph = with_others(plan.graph, taken_bytes, in_flight)
            platform = single_device(kind=graph.device_kinds[0])
            trace = simulate(graph, platform, plan.schedule)
            self._needed[key] = plan, trace.peak_bytes[0]
        return self._needed[key][1]

    def _cure(self, plan: Plan, count: int, over_bytes: int) -> str:
        if not self.is_plannable:
            return f"{self.cure}, give a budget that is {format_bytes(over_bytes)} less"
        if count < plan.in_flight:
            return (
                "If some begin while there are gradients, as in the stages of a pipeline, "
                f"give remat.fit(..., in_flight={plan.in_flight}, accumulate=True); if "
                "their shapes differ, say with dynamic= how"
            )
        return f"Give remat.fit(..., in_flight={count + 1})"

    def _saved_bytes(self, plan: Plan) -> int:
        known = self._saved.get(id(plan))
        if known is None:
            known = plan, saved_bytes(plan.graph, plan.schedule, plan.trace)
            self._saved[id(plan)] = known
        return known[1]
