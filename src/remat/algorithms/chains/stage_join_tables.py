"""Joins of chains of unequal stages, on quantised sizes: twin of the native core.

What remains after the turn is, per branch, a *node*: how many of its stages are not yet
reversed, and whether the last of them has run with an option whose savings are stored.
With ``s`` slots of stored items in all branches, and a gradient per branch, a branch
has ``m = S - s - gradients of the others`` slots to reverse its stages ``b .. p - 1``
in,
which costs ``below(b, p - 1, m)`` or ``held(b, p - 1, k, m)`` of
:mod:`remat.algorithms.chains.rotor_tables`::

    W(nodes, s) = min over branch, base b, way to keep value b of
                  cost of b .. p - 1 in m + what keeping added before the turn
                  + W(nodes with the branch at b, s - what is released)

Value ``b`` is kept as such, or as the output of stage ``b - 1`` run with an option.
When stages ``b .. p - 1`` are reversed, value ``b`` goes, unless the backward of stage
``b - 1`` needs it, and so does what was saved in stage ``p - 1``.

At the turn all last values and all their gradients are live as well. The forward pass
visits the branches one by one; whether it fits depends on their order and on where the
stored items lie, which a state does not tell. Candidates are therefore tried from the
cheapest on, each with every order of branches, until one fits.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from math import prod

from remat.algorithms.chains.join_tables import INFINITE
from remat.algorithms.chains.rotor_tables import (
    ADVANCE,
    SAVE,
    TURN,
    ChainNumbers,
    Rotor,
    check_chain,
    check_slots,
)
from remat.core.checks import require
from remat.native import check_counts, check_table, native

MAX_BRANCHES = 6
"""Most branches, all orders of which are tried for the forward pass."""

Node = tuple[int, int]
"""Stages of a branch not yet reversed; option that the last of them ran with, or -1."""

StageJoinAnswer = tuple[int, int, list[tuple[int, int, int, int]]]
"""Time; least time of any candidate; what runs: kind, branch, stage, option."""


class _StageJoin:
    def __init__(
        self,
        chains: Sequence[ChainNumbers],
        turn: tuple[int, int],
        slot_bytes: int,
        slots: int,
        *,
        beyond: bool,
    ) -> None:
        self.rotors = [Rotor(chain, slot_bytes, beyond=beyond) for chain in chains]
        self.turn_ns, self.turn_workspace = turn
        self.slots = slots
        self.beyond = beyond
        self.cost = cache(self._cost)

    def gradient_slots(self, branch: int, value: int) -> int:
        rotor = self.rotors[branch]
        return rotor.slots(rotor.gradients[value])

    def room(self, nodes: tuple[Node, ...], stored: int, branch: int) -> int:
        """Return the slots in which ``branch`` may be reversed."""
        others = sum(
            self.gradient_slots(j, left)
            for j, (left, _) in enumerate(nodes)
            if j != branch
        )
        return self.slots - stored - others

    def kinds(self, branch: int, value: int) -> Iterator[tuple[int, int, int]]:
        """Yield the ways to keep a value: option or -1, time added, slots released."""
        rotor = self.rotors[branch]
        yield -1, 0, rotor.slots(rotor.values[value])
        if value > 0:
            for k, option in rotor.saving(value - 1):
                added = option[0] - rotor.forward[value - 1]
                passed, kept = rotor.passed(value - 1, k), rotor.kept(value - 1, k)
                yield k, added, passed - kept

    def ways(
        self, nodes: tuple[Node, ...], stored: int
    ) -> Iterator[tuple[int, int, Node, tuple[Node, ...], int]]:
        """Yield cost, branch, its next node, all next nodes and what stays stored."""
        for branch, (end, option) in enumerate(nodes):
            rotor = self.rotors[branch]
            memory = self.room(nodes, stored, branch)
            if memory < 0 or end == 0:
                continue
            held = 0 if option < 0 else rotor.kept(end - 1, option)
            for base in range(end - 1, -1, -1):
                if option >= 0 and base < end - 1 and not self.beyond:
                    continue
                here = rotor.rest(base, end - 1, option, memory)
                if here >= INFINITE:
                    continue
                for kind, added, released in self.kinds(branch, base):
                    after = stored - held - released
                    if after >= 0:
                        node = (base, kind)
                        rest = (*nodes[:branch], node, *nodes[branch + 1 :])
                        cost = here + added + self.cost(rest, after)
                        yield min(cost, INFINITE), branch, node, rest, after

    def _cost(self, nodes: tuple[Node, ...], stored: int) -> int:
        if not any(left for left, _ in nodes):
            return 0 if stored == 0 else INFINITE
        return min((way[0] for way in self.ways(nodes, stored)), default=INFINITE)

    def candidates(self) -> Iterator[tuple[int, tuple[Node, ...], int]]:
        """Yield time, nodes and stored slots of what may be live after the turn."""
        lengths = [rotor.length for rotor in self.rotors]
        gradients = sum(
            rotor.gradients[length]
            for rotor, length in zip(self.rotors, lengths, strict=True)
        )
        need = self.rotors[0].slots(gradients + self.turn_workspace)
        forward = sum(sum(rotor.forward) for rotor in self.rotors)
        tops = [list(self.kinds(j, length)) for j, length in enumerate(lengths)]
        for kinds in product(*tops):
            nodes = tuple(
                (length, kind[0]) for length, kind in zip(lengths, kinds, strict=True)
            )
            passing = sum(kind[2] for kind in kinds)
            added = sum(kind[1] for kind in kinds) + forward + self.turn_ns
            for stored in range(self.slots - need - passing + 1):
                cost = self.cost(nodes, stored)
                if cost < INFINITE:
                    yield cost + added, nodes, stored

    def sections(
        self, nodes: tuple[Node, ...], stored: int
    ) -> list[tuple[int, int, Node, Node]]:
        """Return what is reversed: branch, room, node before and after."""
        found: list[tuple[int, int, Node, Node]] = []
        while any(left for left, _ in nodes):
            way = min(self.ways(nodes, stored), key=lambda way: way[0])
            _, branch, node, rest, after = way
            room = self.room(nodes, stored, branch)
            found.append((branch, room, nodes[branch], node))
            nodes, stored = rest, after
        return found

    def forward_pass(
        self, kept: Sequence[dict[int, int]], order: Sequence[int]
    ) -> list[tuple[int, int, int, int]] | None:
        """Return the pass that stores ``kept`` of each branch, if it fits.

        ``kept`` has, per stored value, the option that its stage is run with or -1.
        """
        stored = sum(rotor.slots(rotor.values[0]) for rotor in self.rotors)
        run: list[tuple[int, int, int, int]] = []
        for branch in order:
            rotor = self.rotors[branch]
            for stage in range(rotor.length):
                option = kept[branch].get(stage + 1, -1)
                need = rotor.step_bytes(stage, option)
                if stage not in kept[branch]:
                    need += rotor.values[stage]
                if stored + rotor.slots(need) > self.slots:
                    return None
                is_top = stage + 1 == rotor.length
                if option >= 0:
                    run.append((SAVE, branch, stage, option))
                    stored += rotor.passed(stage, option)
                else:
                    run.append((ADVANCE, branch, stage, -1))
                    if is_top or stage + 1 in kept[branch]:
                        stored += rotor.slots(rotor.values[stage + 1])
        return run

    def answer(self) -> StageJoinAnswer | None:
        candidates = sorted(
            enumerate(self.candidates()), key=lambda entry: (entry[1][0], entry[0])
        )
        for _, (cost, nodes, stored) in candidates:
            sections = self.sections(nodes, stored)
            kept: list[dict[int, int]] = [
                {} if kind < 0 else {left: kind} for left, kind in nodes
            ]
            for branch, _, _, (base, kind) in sections:
                kept[branch][base] = kind
            for order in permutations(range(len(self.rotors))):
                run = self.forward_pass(kept, order)
                if run is not None:
                    back = self.backward_pass(sections)
                    everything = [*run, (TURN, -1, -1, -1), *back]
                    return cost, candidates[0][1][0], everything
        return None

    def backward_pass(
        self, sections: Sequence[tuple[int, int, Node, Node]]
    ) -> list[tuple[int, int, int, int]]:
        return [
            (kind, branch, stage, k)
            for branch, room, (end, option), (base, _) in sections
            for kind, stage, k in self.rotors[branch].expand(
                base, end - 1, option, room
            )
        ]


@native
def stage_join_plan(
    chains: Sequence[ChainNumbers],
    turn: tuple[int, int],
    slot_bytes: int,
    slots: int,
    beyond: bool,  # noqa: FBT001 - as in C++, where arguments have no names
) -> StageJoinAnswer | None:
    """Return the quickest schedule of a join of chains of stages, or ``None``.

    Parameters
    ----------
    chains
        The branches; their own turns are not looked at.
    turn
        Time and workspace bytes of the turn.
    slot_bytes, slots
        Size of a slot, at least 1, and number of slots for everything.
    beyond
        Whether stored values may be dropped before their last use.

    Notes
    -----
    Of equally quick ways: the first branch, the nearest base, the value itself before
    options; at the turn, the first in the order of candidates. Table of (slots + 1)
    times the product over branches of 1 + stages * (1 + options) entries.
    """
    require(1 <= len(chains) <= MAX_BRANCHES, "a join has 1 to 6 branches")
    check_slots(slot_bytes, slots)
    checked = [check_chain(chain) for chain in chains]
    check_counts(turn[1:], (one.size_bytes for one in checked))
    require(turn[0] >= 0, "a number is negative")
    worst_ns = turn[0] + sum(one.worst_ns for one in checked)
    require(worst_ns < INFINITE, "times add up to 2**61 or more at worst")
    states = prod(1 + sum(1 + len(of_stage) for of_stage in c[4]) for c in chains)
    rows = sum(one.below_rows + one.held_rows for one in checked)
    check_table((rows + states) * (slots + 1))
    for chain in chains:
        for forward_ns, options in zip(chain[2], chain[4], strict=True):
            require(
                all(option[0] < 0 or option[0] >= forward_ns for option in options),
                "a forward that saves takes less time than one that does not",
            )
    join = _StageJoin(chains, turn, slot_bytes, slots, beyond=beyond)
    return join.answer()
