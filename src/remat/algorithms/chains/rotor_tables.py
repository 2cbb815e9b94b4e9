"""The Rotor program on quantised sizes, as a plain function: twin of the native core.

Stages are 0 .. L - 1; stage ``s`` reads value ``s`` and writes value ``s + 1``; stage
``L`` stands for the turn. Memory ``m`` is in slots.

``below(s, t, m)``
    least time to run stages ``s .. t`` forward and backward, with value ``s`` stored
    outside of ``m`` and the gradient of value ``t + 1`` live inside of it.
``held(s, t, k, m)``
    the same where stage ``t`` has already run with option ``k``, and what its backward
    needs of that is held outside of ``m``: only value ``t`` has to be brought back.

Ways to go on from ``below(s, t, m)``:

1. advance from ``s`` to a value ``v`` keeping nothing, store ``v``, do ``below(v, t)``
   in what is left, then ``below(s, v - 1)`` in all of ``m``;
2. run stage ``s`` with an option, do ``below(s + 1, t)`` with what it saved held, then
   its backward;
3. advance to ``v``, run stage ``v`` with an option *and drop value ``v``*, do
   ``below(v + 1, t)``, then ``held(s, v)``.

1 and 2 are the published program: a value once stored stays until its last use. 3 goes
beyond this persistence. ``held`` goes on in the same three ways, with the memory of
what was held added once the backward of stage ``t`` is done.

Transient needs of an operation (its gradient, its input where that is not stored, its
outputs, its workspace) are rounded up once, as a sum; what is stored, one by one.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from remat.algorithms.chains.join_tables import INFINITE
from remat.core.checks import require
from remat.core.units import ceil_slots
from remat.native import MOST_TOTAL, check_counts, check_table, native

ADVANCE, SAVE, BACKWARD, TURN = range(4)

Option = tuple[int, int, int, bool, int, int]
"""Forward time (-1: no forward), backward time, saved bytes, whether the output is
needed, forward and backward workspace bytes."""

ChainNumbers = tuple[
    Sequence[int],
    Sequence[int],
    Sequence[int],
    Sequence[int],
    Sequence[Sequence[Option]],
    tuple[int, int],
]
"""Sizes in bytes of the input and of each stage's output, and of their gradients; time
and workspace bytes of each stage's forward that keeps nothing; the options of each
stage; time and workspace bytes of the turn."""

RotorAnswer = tuple[int, list[tuple[int, int, int]]]
"""Time, and what runs: (ADVANCE, stage, -1), (SAVE, stage, option),
(BACKWARD, stage, option), (TURN, -1, -1)."""

_Run = list[tuple[int, int, int]]
_Task = tuple[int, int, int, int]
"""``rest`` of these numbers; without memory (-1), the backward of a stage alone."""

_Way = tuple[int, _Run, list[_Task]]
"""Time of a way to go on, what runs at once, and what is to be done then."""


class Rotor:
    """Values of the program as they are asked for, and what runs from a state."""

    def __init__(
        self,
        chain: ChainNumbers,
        slot_bytes: int,
        *,
        beyond: bool,
    ) -> None:
        self.values, self.gradients, self.forward, self.workspace = chain[:4]
        self.options = chain[4]
        self.turn_ns, self.turn_workspace = chain[5]
        self.slot_bytes = slot_bytes
        self.beyond = beyond
        self.length = len(self.forward)
        self.rest = cache(self._rest)

    def slots(self, size_bytes: int) -> int:
        """Return the slots that hold a size."""
        return ceil_slots(size_bytes, self.slot_bytes)

    # --- sizes, in slots ---------------------------------------------------------

    def gradient(self, top: int) -> int:
        """Bytes of the gradient above stage ``top``; nothing is above the turn."""
        return 0 if top == self.length else self.gradients[top + 1]

    def advance_need(self, base: int, top: int, value: int) -> int:
        """Slots that advancing from ``base`` to ``value`` needs."""
        most = 0
        for stage in range(base, value):
            source = self.values[stage] if stage > base else 0
            output = self.values[stage + 1]
            most = max(most, source + output + self.workspace[stage])
        return self.slots(most + self.gradient(top))

    def save_need(self, stage: int, option: int, top: int, *, is_base: bool) -> int:
        """Slots that running ``stage`` with ``option`` needs, below ``top``."""
        source = 0 if is_base else self.values[stage]
        need = source + self.step_bytes(stage, option) + self.gradient(top)
        return self.slots(need)

    def step_bytes(self, stage: int, option: int) -> int:
        """Bytes that running ``stage`` adds; ``option`` is -1 if it keeps nothing."""
        most = self.workspace[stage]
        if option >= 0:
            _, _, saved, _, workspace, _ = self.options[stage][option]
            most = max(most, saved + workspace)
        return self.values[stage + 1] + most

    def backward_need(self, stage: int, option: int, *, is_held: bool) -> int:
        """Slots that the backward of ``stage`` needs, its held part counted or not."""
        _, _, saved, needs_output, _, workspace = self.options[stage][option]
        inside = saved + (self.values[stage + 1] if needs_output else 0)
        return self.slots(
            self.gradients[stage + 1]
            + self.gradients[stage]
            + workspace
            + (0 if is_held else inside)
        )

    def passed(self, stage: int, option: int) -> int:
        """Slots that stay while the stages above run: what is saved, and the output."""
        return self.slots(self.options[stage][option][2] + self.values[stage + 1])

    def kept(self, stage: int, option: int) -> int:
        """Slots that stay when the stages above are done."""
        _, _, saved, needs_output, _, _ = self.options[stage][option]
        return self.slots(saved + (self.values[stage + 1] if needs_output else 0))

    def sweep(self, base: int, value: int) -> int:
        """Return the time to advance from ``base`` to ``value``."""
        return sum(self.forward[base:value])

    def saving(self, stage: int) -> Iterator[tuple[int, Option]]:
        """Yield the options with a forward."""
        return ((k, o) for k, o in enumerate(self.options[stage]) if o[0] >= 0)

    # --- the recurrence ----------------------------------------------------------

    def _rest(self, base: int, top: int, option: int, memory: int) -> int:
        """Return ``held(base, top, option, memory)``.

        It is ``below(base, top, memory)`` where ``option`` is -1: nothing is held.
        """
        ways = (cost for cost, _, _ in self.ways(base, top, option, memory))
        return min(min(ways, default=INFINITE), INFINITE)

    def ways(self, base: int, top: int, option: int, memory: int) -> Iterator[_Way]:
        """Yield every way to go on, those of one kind after the other."""
        if base == top:
            yield from self.single(base, option, memory)
            return
        freed = memory if option < 0 else memory + self.kept(top, option)
        for value in range(base + 1, top + 1):
            left = memory - self.slots(self.values[value])
            if memory >= self.advance_need(base, top, value) and left >= 0:
                tasks = [(value, top, option, left), (base, value - 1, -1, freed)]
                cost = self.sweep(base, value) + self.cost_of(tasks)
                yield cost, self.advance(base, value), tasks
        for k, saving in self.saving(base):
            left = memory - self.passed(base, k)
            if (
                memory >= self.save_need(base, k, top, is_base=True)
                and freed >= self.backward_need(base, k, is_held=False)
                and left >= 0
            ):
                above = (base + 1, top, option, left)
                cost = saving[0] + saving[1] + self.rest(*above)
                yield cost, [(SAVE, base, k)], [above, (base, base, k, -1)]
        if self.beyond:
            yield from self.dropping(base, top, option, memory, freed)

    def single(self, stage: int, option: int, memory: int) -> Iterator[_Way]:
        """Yield the ways to do one stage."""
        if option >= 0:
            if memory >= self.backward_need(stage, option, is_held=True):
                run = [(BACKWARD, stage, option)]
                yield self.options[stage][option][1], run, []
            return
        if stage == self.length:
            need = self.slots(self.gradients[stage] + self.turn_workspace)
            if memory >= need:
                yield self.turn_ns, [(TURN, -1, -1)], []
            return
        for k, o in enumerate(self.options[stage]):
            need = self.backward_need(stage, k, is_held=False)
            if o[0] >= 0:
                need = max(need, self.save_need(stage, k, stage, is_base=True))
            if memory >= need:
                run = [(SAVE, stage, k)] if o[0] >= 0 else []
                yield max(o[0], 0) + o[1], [*run, (BACKWARD, stage, k)], []

    def dropping(
        self, base: int, top: int, option: int, memory: int, freed: int
    ) -> Iterator[_Way]:
        """Yield the ways of kind 3."""
        for value in range(base + 1, min(top, self.length)):
            for k, saving in self.saving(value):
                need = max(
                    self.advance_need(base, top, value),
                    self.save_need(value, k, top, is_base=False),
                )
                left = memory - self.passed(value, k)
                if memory >= need and left >= 0:
                    after = freed - self.kept(value, k)
                    tasks = [(value + 1, top, option, left), (base, value, k, after)]
                    cost = self.sweep(base, value) + saving[0] + self.cost_of(tasks)
                    yield cost, [*self.advance(base, value), (SAVE, value, k)], tasks

    def cost_of(self, tasks: Sequence[_Task]) -> int:
        """Return the time of what is to be done."""
        return sum(self.rest(*task) for task in tasks)

    def advance(self, base: int, value: int) -> _Run:
        """Return what runs to advance from ``base`` to ``value``."""
        return [(ADVANCE, stage, -1) for stage in range(base, value)]

    def answer(self, memory: int) -> RotorAnswer | None:
        """Return the quickest schedule in ``memory`` slots besides the input."""
        cost = self.rest(0, self.length, -1, memory) if memory >= 0 else INFINITE
        if cost >= INFINITE:
            return None
        return cost, self.expand(0, self.length, -1, memory)

    def expand(self, base: int, top: int, option: int, memory: int) -> _Run:
        """Return what runs from ``rest(base, top, option, memory)``."""
        order: _Run = []
        pending = [(base, top, option, memory)]
        while pending:
            base, top, option, left = pending.pop()
            if left < 0:
                order.append((BACKWARD, base, option))
                continue
            ways = self.ways(base, top, option, left)
            _, run, tasks = min(ways, key=lambda way: way[0])
            order += run
            pending += reversed(tasks)
        return order


class Checked(NamedTuple):
    """What a chain comes to: bytes, time at worst, rows of the two tables."""

    size_bytes: int
    worst_ns: int
    below_rows: int
    held_rows: int


def check_chain(chain: ChainNumbers) -> Checked:
    """Refuse a chain whose numbers do not fit together or cannot be counted.

    Raises
    ------
    ValueError
        If there are such.
    """
    values, gradients, forward, workspace, options, turn = chain
    rows = len(forward) + 1
    require(
        len(values) == len(gradients) == rows
        and len(workspace) == len(options) == rows - 1,
        "the lists of a chain differ in length",
    )
    all_options = [option for of_stage in options for option in of_stage]
    for option in all_options:
        require(option[0] >= -1, "a time of an option is less than -1")
    size_bytes = check_counts(
        values,
        gradients,
        workspace,
        turn[1:],
        (size for o in all_options for size in (o[2], o[4], o[5])),
    )
    times = [*forward, *(max(o[0], 0) for o in all_options)]
    backward = [option[1] for option in all_options]
    require(min([turn[0], *times, *backward]) >= 0, "a number is negative")
    worst_ns = rows * (rows * max(times, default=0) + max(backward, default=0))
    require(worst_ns + turn[0] < INFINITE, "times add up to 2**61 or more at worst")
    held_rows = sum((s + 1) * len(of_stage) for s, of_stage in enumerate(options))
    below_rows = rows * (rows + 1) // 2
    return Checked(size_bytes, worst_ns + turn[0], below_rows, held_rows)


def check_slots(slot_bytes: int, slots: int) -> None:
    """Refuse slots that cannot be.

    Raises
    ------
    ValueError
        If there are such.
    """
    require(1 <= slot_bytes <= MOST_TOTAL, "a slot must have 1 to 2**60 bytes")
    require(0 <= slots <= MOST_TOTAL, "there must be 0 to 2**60 slots")


@native
def rotor_plan(
    chain: ChainNumbers,
    slot_bytes: int,
    slots: int,
    beyond: bool,  # noqa: FBT001 - as in C++, where arguments have no names
) -> RotorAnswer | None:
    """Return the quickest schedule of a chain in ``slots`` slots, or ``None``.

    Parameters
    ----------
    chain
        The chain in numbers, see :data:`ChainNumbers`.
    slot_bytes, slots
        Size of a slot, at least 1, and number of slots for everything.
    beyond
        Whether stored values may be dropped before their last use.

    Notes
    -----
    Of equally quick ways: the first in the order of the module docstring, with nearer
    values and earlier options first.
    """
    checked = check_chain(chain)
    check_slots(slot_bytes, slots)
    held_rows = checked.held_rows if beyond else 0
    check_table((checked.below_rows + held_rows) * (slots + 1))
    rotor = Rotor(chain, slot_bytes, beyond=beyond)
    return rotor.answer(slots - rotor.slots(chain[0][0]))
