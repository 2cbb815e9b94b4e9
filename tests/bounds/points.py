"""What a schedule says of the variables of a moment program."""

from fractions import Fraction

from remat.bounds.moment_program import MomentProgram
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.schedule import Boundary, Compute, Discard, Schedule


def trimmed(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """Return a schedule less runs that serve nothing, discarding at the last use."""
    runs = [
        step.op if isinstance(step, Compute) else BOUNDARY
        for step in schedule.steps
        if isinstance(step, Compute | Boundary)
    ]
    first = {op: place for place, op in reversed([*enumerate(runs)])}
    needed = {*graph.final_outputs}
    kept: list[int] = []
    for place, op in reversed([*enumerate(runs)]):
        if op == BOUNDARY:
            reads, writes, is_needed = graph.forward_outputs, graph.tangents, True
        else:
            reads, writes = graph.ops[op].reads, graph.ops[op].writes
            has_effect = graph.ops[op].is_ordered or not writes
            is_needed = bool(needed.intersection(writes))
            is_needed = is_needed or (has_effect and first[op] == place)
        if is_needed:
            kept.append(op)
            needed.difference_update(writes)
            needed.update(reads)
    return schedule_from_order(graph, tuple(reversed(kept)))


def point_of(program: MomentProgram, schedule: Schedule) -> list[Fraction]:
    """Return the values of all variables, each by what it means."""
    step = program.instance
    live: set[int] = set()
    live_at: list[set[int]] = [set()]
    runs: set[tuple[int, int]] = set()
    seen: set[int] = set()

    def arrive(node: int) -> None:
        if node in program.moment_of and node not in seen:
            assert program.moment_of[node] == len(live_at)
            live_at.append(set(live))
        seen.add(node)

    for action in schedule.steps:
        match action:
            case Compute(op):
                arrive(op)
                runs.add((op, len(live_at) - 1))
                live.update(step.writes[op])
            case Discard(storage):
                live.discard(storage)
            case Boundary():
                arrive(step.boundary)
                live.update(step.writes[step.boundary])
            case _:
                raise AssertionError(action)
    arrive(step.end)
    assert len(live_at) == program.count + 1
    values = [Fraction(0)] * len(program.program.cost)
    for (start, stop), variables in program.runs.items():
        for op, variable in variables.items():
            values[variable] = Fraction(
                any((op, j) in runs for j in range(start, stop))
            )
    for j, variables in enumerate(program.live):
        for item, variable in variables.items():
            values[variable] = Fraction(item in live_at[j])
    _throughout(program, live_at, runs, values)
    return values


def _throughout(
    program: MomentProgram,
    live_at: list[set[int]],
    runs: set[tuple[int, int]],
    values: list[Fraction],
) -> None:
    """Say what is live all through an interval."""
    step = program.instance
    for (start, stop), variables in program.throughout.items():
        used = 0
        for item, variable in variables.items():
            ran = any((step.producer[item], j) in runs for j in range(start, stop))
            # Not made in between, so there from the beginning to the end.
            stays = item in live_at[stop] and not ran
            values[variable] = Fraction(stays)
            used += stays * step.size_bytes[item]
        share = program.shares[start, stop]
        values[share] = Fraction(used, max(1, program.memory_bytes))


def broken_rows(program: MomentProgram, values: list[Fraction]) -> list[int]:
    """Return the rows that values break, -1 for a bound of a variable."""
    rows = program.program
    broken = [
        row
        for row in range(rows.row_count)
        if sum(
            rows.coefficients[entry] * values[rows.columns[entry]]
            for entry in range(rows.starts[row], rows.starts[row + 1])
        )
        < rows.right[row]
    ]
    for value, is_forced in zip(values, rows.is_forced, strict=True):
        if not is_forced <= value <= 1:
            broken.append(-1)
    return broken
