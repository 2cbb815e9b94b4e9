"""Drive one function of the native core with hostile arguments, in its own process.

``python -m tests.native.hostile NAME LOG`` changes valid arguments of the function in
one or two places, calls the function and its Python twin with each, and writes a line
per case *before* it runs, so that what kills the process is known. Then it prints how
many there were, and how many were refused.
A function and its twin must give the same answer or raise the same exception.
"""

import inspect
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from remat.algorithms.chains.join_tables import join_plan, join_plan_by_branch
from remat.algorithms.chains.level_tables import disk_revolve_plan, hrevolve_plan
from remat.algorithms.chains.rotor_tables import rotor_plan
from remat.algorithms.chains.stage_join_tables import stage_join_plan
from remat.algorithms.lower_sets.canonical import implied_training_graph
from remat.algorithms.lower_sets.families import (
    enumerate_lower_sets,
    neighbouring_lower_sets,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.narrowest import narrowest_lower_sets
from remat.algorithms.lower_sets.recurrences import (
    smallest_lower_set_budget,
    solve_lower_sets,
)
from remat.core.allocator import AllocatorSettings
from remat.core.graph import TrainingGraph
from remat.core.liveness import store_all_order
from remat.core.platform import Device, Link, Platform
from remat.core.problem import Problem
from remat.memory.caching_allocator import Request, replay_requests, rules_of
from remat.native import core
from remat.search import device_execution as execution
from remat.search import eviction
from remat.search.device_instance import DeviceInstance
from remat.search.local_moves import passes_of, weigh_moves
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import (
    improve_retention,
    weigh_order,
    without_unread_runs,
)

INTEGERS = (
    *(0, 1, 2, 3, -1, -2, 2**31, 2**53, 2**60, 2**62),
    *(2**63 - 1, 2**63, 2**64, -(2**31), -(2**62), -(2**63)),
)
OTHERS = (1.5, 3.0, float("nan"), float("inf"), None, "1", b"1", [], np.True_)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 1e300, 5e-324, 9.0, 2, "1")
WORDS = (0, 1, 2**63, 2**64 - 1)

SINGLE, DOUBLE = 800, 400
"""Most cases with one change, and cases with two, of each function."""

MOST_BYTES = 12 << 30

TIED = ("solve_lower_sets", "smallest_lower_set_budget")
"""Functions whose twins may give another answer that is as good, or stop elsewhere."""

Arguments = tuple[Any, ...]


def small_graph() -> TrainingGraph:
    """Return the step of a diamond with a tail."""
    forward = ForwardGraph(
        memory_bytes=(3, 2, 4, 1),
        cost=(1, 2, 1, 3),
        edges=((0, 1), (0, 2), (1, 3), (2, 3)),
    )
    return implied_training_graph(forward)


def arguments_of(module: Any, name: str, call: Callable[[], object]) -> Arguments:
    """Return what a function of a module is called with."""
    with mock.patch.object(module, name, wraps=getattr(module, name)) as spy:
        call()
    return spy.call_args.args


def plain(value: Any) -> Any:
    """Return arguments with lists for sequences, and tuples left as they are."""
    if isinstance(value, tuple):
        return tuple(plain(entry) for entry in value)
    if isinstance(value, list | range):
        return [plain(entry) for entry in value]
    return int(value) if isinstance(value, IntEnum) else value


def bases() -> dict[str, tuple[Any, Arguments]]:
    """Return the twin, or ``None``, and valid arguments of every native function."""
    chain = (
        [3, 2, 4],
        [1, 2, 2],
        [1, 2],
        [0, 1],
        [[(1, 2, 1, True, 0, 1)], [(3, 1, 2, False, 1, 0), (-1, 5, 0, False, 0, 2)]],
        (1, 1),
    )
    short = ([1, 1], [1, 1], [1], [0], [[(1, 1, 1, True, 0, 0)]], (0, 0))
    lower = ([1, 3], [1, 1], [2, 2], [(0, 1)], 0)
    rows = np.array([[0], [1], [3]], dtype=np.uint64)
    queries = [(9, 0, False), (7, 1, True)]
    graph = small_graph()
    numbers, order = plain_numbers(graph), store_all_order(graph)
    evicted = eviction.evicting_order(graph, 17) or order
    instance = DeviceInstance.of(
        Problem(
            graph=graph,
            platform=Platform(
                devices=(Device(budget_bytes=17), Device(name="b")),
                links=tuple(
                    Link(source=a, target=1 - a, bytes_per_s=10**9) for a in (0, 1)
                ),
            ),
        )
    )
    everywhere = [(0,)] * len(graph.ops)
    state = np.zeros(5056, dtype=np.uint8)
    state[8] = state[12] = 1
    join = ([[1, 2], [3]], 6, (1, 1, True, False))
    return {
        "join_plan": (join_plan, join),
        "join_plan_by_branch": (join_plan_by_branch, (*join, [[0, 1], [1, 0]])),
        "hrevolve_plan": (hrevolve_plan, (4, [1, 2], [0, 2], [0, 3], 1, 1)),
        "disk_revolve_plan": (disk_revolve_plan, ([1, 3, 6, 10], 5, 5, 1, 1)),
        "rotor_plan": (rotor_plan, (chain, 2, 20, True)),
        "stage_join_plan": (
            stage_join_plan,
            ([chain, short], (1, 1), 2, 24, True),
        ),
        "enumerate_lower_sets": (enumerate_lower_sets, (3, [(0, 1), (1, 2)], 10)),
        "narrowest_lower_sets": (
            narrowest_lower_sets,
            ([3, 1, 2], [(0, 1), (1, 2)], [(0, 2)]),
        ),
        "neighbouring_lower_sets": (neighbouring_lower_sets, ([(0, 1)], rows, 2)),
        "solve_lower_sets": (solve_lower_sets, (lower, rows, queries, [[1, 2]], None)),
        "smallest_lower_set_budget": (
            smallest_lower_set_budget,
            (lower, rows, [[1, 2]], None),
        ),
        "plain_solve_lower_sets": (None, (lower, rows, queries, [], None)),
        "weigh_order": (weigh_order, (numbers, order)),
        "without_unread_runs": (without_unread_runs, (numbers, evicted)),
        "improve_retention": (improve_retention, (numbers, evicted, 20, 1.0, None)),
        "weigh_moves": (
            weigh_moves,
            (numbers, passes_of(graph), order, [(1, 6, 0), (0, 6, 0), (2, 1, 3)]),
        ),
        # It has no twin: nothing but the core is fast enough for it.
        "search_orders": (
            None,
            (numbers, passes_of(graph), order, (20, 0, 500, 1), 2.0, 0.1, None),
        ),
        "run_evicting": (
            eviction.run_evicting,
            arguments_of(
                eviction, "run_evicting", lambda: eviction.evicting_order(graph, 17)
            ),
        ),
        "run_on_devices": (
            execution.run_on_devices,
            arguments_of(
                execution,
                "run_on_devices",
                lambda: execution.execute(instance, everywhere),
            ),
        ),
        "replay_requests": (
            replay_requests,
            (
                [
                    Request(0, 7, 600, 1),
                    Request(2, 7, stream=2),
                    Request(0, 8, 3 << 20),
                    Request(1, 7),
                    Request(3, stream=2),
                    Request(4),
                ],
                rules_of(AllocatorSettings(), segment_addresses=[2**30, 2**22]),
                1,
            ),
        ),
        # Its twin is PyTorch's own.
        "draw_mask": (None, (state, np.zeros(9, dtype=np.uint8), 0.5)),
    }


def places(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to everything inside of arguments."""
    if path:
        yield path
    if isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from places(entry, (*path, index))


def at(value: Any, path: tuple[int, ...]) -> Any:
    for index in path:
        value = value[index]
    return value


def changed(value: Any, path: tuple[int, ...], new: Any) -> Any:
    if not path:
        return new
    entries = list(value)
    entries[path[0]] = changed(entries[path[0]], path[1:], new)
    return type(value)(entries)


def worse(value: Any, chance: random.Random) -> Any:
    """Return something hostile in the place of a value."""
    if isinstance(value, np.ndarray):
        array = value.copy()
        if array.size == 0 or chance.random() < 0.3:
            return array[: chance.randrange(len(array) + 1)].copy()
        if array.ndim == 2 and chance.random() < 0.2:
            return np.hstack([array, array])
        most = np.iinfo(array.dtype).max
        array.flat[chance.randrange(array.size)] = min(chance.choice(WORDS), most)
        return array
    if isinstance(value, list | tuple):
        kind = chance.randrange(4)
        if kind == 0 or not value:
            return type(value)(())
        if kind == 1:
            return value[:-1]
        return type(value)([*value, value[-1]]) if kind == 2 else chance.choice(OTHERS)
    if isinstance(value, float):
        return chance.choice(FLOATS)
    return chance.choice(INTEGERS if chance.random() < 0.75 else OTHERS)


def cases(base: Arguments, chance: random.Random) -> Iterator[tuple[str, Arguments]]:
    """Yield what was changed, and the arguments."""
    paths = list(places(base))
    every = [(path, new) for path in paths for new in INTEGERS]
    every = [(path, new) for path, new in every if type(at(base, path)) is int]
    chance.shuffle(every)
    for path, new in every[: SINGLE // 2]:
        yield f"{path} = {new!r}", changed(base, path, new)
    for _ in range(SINGLE // 2 + DOUBLE):
        arguments, words = base, ""
        for _ in range(chance.choice((1, 1, 2))):
            path = chance.choice(list(places(arguments)))
            new = worse(at(arguments, path), chance)
            words += f"{path} = {str(new)[:80]!r} "
            arguments = changed(arguments, path, new)
        yield words, arguments


def outcome(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Return the answer of a call, or the type of its exception."""
    try:
        answer = function(*arguments)
    except Exception as error:  # noqa: BLE001 - compared with the twin's
        return type(error).__name__
    if isinstance(answer, np.ndarray):
        return answer.tolist()
    return repr(plain(answer)).replace("(", "[").replace(")", "]").replace(",]", "]")


def main(name: str, log: Path) -> None:
    """Run the cases of one function; see the module."""
    if "LD_PRELOAD" not in os.environ:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    twin, base = bases()[name]
    function = getattr(core(), name)
    chance = random.Random(name)
    count = refused = 0
    with log.open("w") as lines:
        for words, arguments in cases(plain(base), chance):
            lines.write(f"{words}\n")
            lines.flush()
            found = outcome(function, arguments)
            is_refused = found in ("TypeError", "ValueError", "KeyError")
            if found == "MemoryError":
                sys.exit(f"{name} took all memory: {words}")
            if not is_refused and isinstance(found, str) and found.endswith("Error"):
                sys.exit(f"{name} raised {found}: {words}")
            if twin is not None:
                other = outcome(inspect.unwrap(twin), arguments)
                if name in TIED and not is_refused:
                    is_same = not other.endswith("Error")
                else:
                    is_same = other == found
                if not is_same:
                    sys.exit(f"{name}: {words}: the core {found}, the twin {other}")
            count += 1
            refused += is_refused
    sys.stdout.write(f"{count} {refused}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
