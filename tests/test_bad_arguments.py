"""What makes no sense is refused where it enters, and the message names it.

Every public dataclass and function of the planning part is called with valid arguments
of which one is replaced by something that it cannot be.
"""

# The mistakes that are tested.
# pyright: reportArgumentType=false

import dataclasses
import inspect
import math
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from remat import algorithms
from remat import solvers as solver_table
from remat.algorithms import chains, lower_sets
from remat.algorithms.chains import (
    blocks,
    conventions,
    joins,
    levels,
    offload,
    reexecution,
    revolve,
    rotor,
    stage_joins,
    stages,
)
from remat.algorithms.chains.plans import Piece
from remat.algorithms.lower_sets import chen, choice, families, formula, programs
from remat.algorithms.lower_sets.canonical import (
    canonical_schedule,
    implied_training_graph,
)
from remat.backends.mathopt import MipSolver
from remat.core import platform
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import (
    Device,
    DeviceKind,
    Link,
    MeasuredCost,
    MeasuredCosts,
    Platform,
    single_device,
)
from remat.core.problem import Limits, Objective, Problem, Proposal, Status
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule
from remat.core.simulator import simulate
from remat.core.units import ceil_slots, floor_slots, parse_budget, round_up
from remat.planning.curve import trade_off, trade_off_on_devices
from remat.planning.one_device import plan_graph
from remat.planning.portfolio import solve_portfolio
from remat.search.device_execution import ExecutionRule
from remat.search.eviction import EvictionRule
from remat.search.local_moves import MOST_EFFORT
from remat.solvers import (
    SOLVERS,
    DeviceSearch,
    GreedyEviction,
    LocalSearch,
    StoreAll,
)
from remat.solvers.checkmate_model import Rows
from remat.solvers.greedy_eviction import Candidate
from remat.solvers.lower_sets import LowerSetsEffort

ROOT = Path(__file__).parents[1]
NAN, INF = math.nan, math.inf

NEVER: tuple[Any, ...] = (NAN, INF, -INF, object(), (), {"a": 1}, 1j, b"x")
"""No argument here can be any of these."""

NO_INTEGERS: tuple[Any, ...] = (
    *(*NEVER, 1.5, 3.0, "3", True, False, np.True_),
    *(np.float64(2.0), np.array([1, 2])),
)
NO_FLAGS: tuple[Any, ...] = (*NEVER, None, 0, 1, 2, 1.0, "yes", "", np.True_)
NO_WORDS: tuple[Any, ...] = (*NEVER, None, 0, True, 1.5, "", "overlap", "foo")
NO_TEXT: tuple[Any, ...] = (*NEVER, None, 0, True, 1.5)
NO_NAMES = (*NO_TEXT, "")
NO_LISTS: tuple[Any, ...] = (NAN, object(), 1j, b"x", 3, True, 1.5, "12")
NO_SHARES: tuple[Any, ...] = (*NEVER, None, "1", True, -0.1, 1.1, 2, 10**400)
NO_EXPONENTS: tuple[Any, ...] = (*NEVER, None, "1", True, -0.1, 9.0, 10**400)
NO_SECONDS: tuple[Any, ...] = (*NEVER, "1", True, 0, -1, 0.0, -2.5, 10**400)


def integers(least: int, most: int | None = None, *, optional: bool = False) -> Any:
    """Return what is no integer from ``least`` to ``most``."""
    bad = [*NO_INTEGERS, *(() if optional else (None,))]
    far = [least - 1, least - 2**40, -(2**63), -(2**64)]
    if most is not None:
        far += [most + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**400]
    return tuple(bad + [n for n in far if n < least or (most is not None and n > most)])


def lists(entries: Any) -> Any:
    """Return what is no list of integers, of which these are none."""
    return (*NO_LISTS, *((entry,) for entry in entries))


TOTAL = 2**53
SIZE = integers(0, TOTAL)
SOME = integers(1)
CASES = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]


OPTION = stages.StageOption(forward_ns=2, backward_ns=3, saved_bytes=1)
STAGE = stages.Stage(forward_ns=2, output_bytes=1, options=(OPTION,))
CHAIN = stages.StageChain(stages=(STAGE, STAGE), input_bytes=1)
JOIN = stage_joins.StageJoin(branches=(CHAIN, CHAIN))
LEVEL = levels.StorageLevel(slots=2, write_ns=1, read_ns=1)
LINK = chains.HostLink(out_bytes_per_s=10**9, in_bytes_per_s=10**9)
BLOCK = blocks.Block(branches=(stages.StageChain(stages=(STAGE,)),) * 2, output_bytes=1)
FORWARD = lower_sets.ForwardGraph(
    memory_bytes=(3, 2, 4), cost=(1, 2, 1), edges=((0, 1), (1, 2))
)
GRAPH = implied_training_graph(FORWARD)
FAMILY = choice.choose_family(FORWARD)
QUERY = programs.LowerSetQuery(budget_bytes=100)
PROBLEM = Problem(graph=GRAPH, platform=single_device(100))
COST = MeasuredCost(device="cpu", operator="mm", cost_ns=1)
TWO = Platform(
    devices=(Device(name="a"), Device(name="b", budget_bytes=100)),
    links=tuple(Link(source=s, target=1 - s, bytes_per_s=1) for s in (0, 1)),
)
STRICT = conventions.STRICT
WRONG_TYPES: tuple[Any, ...] = (*NEVER, None, 3, "x", True)


def records() -> Iterator[CASES]:
    """Yield dataclasses, valid fields, and what each field cannot be."""
    yield (
        Storage,
        {"name": "a", "size_bytes": 1},
        {
            "name": NO_TEXT,
            "size_bytes": SIZE,
            "role": NO_WORDS,
            "is_resident": NO_FLAGS,
            "home": integers(0),
        },
    )
    op = {
        "name": "f",
        "reads": (0,),
        "writes": (1,),
        "cost_ns": (1,),
        "workspace_bytes": (0,),
        "phase": Phase.FORWARD,
    }
    yield (
        Op,
        op,
        {
            "name": NO_TEXT,
            "reads": lists(NO_INTEGERS),
            "writes": lists(NO_INTEGERS),
            "cost_ns": lists((*SIZE, None)),
            "workspace_bytes": lists(SIZE),
            "phase": NO_WORDS,
            "is_ordered": NO_FLAGS,
            "is_external": NO_FLAGS,
            "non_recomputable": (NAN, 0, True, object()),
            "source": NO_TEXT,
        },
    )
    fields = {f.name: getattr(GRAPH, f.name) for f in dataclasses.fields(GRAPH)}
    index = lists((*NO_INTEGERS, -1, 99, 2**63))
    yield (
        TrainingGraph,
        fields,
        {
            "name": NO_TEXT,
            "storages": (*NO_LISTS, (1,), (None,)),
            "ops": (*NO_LISTS, (1,), (None,), ()),
            "forward_outputs": index,
            "tangents": index,
            "final_outputs": index,
            "device_kinds": (*NO_LISTS, (), (1,), ("a", "b"), ("a", "a")),
        },
    )
    yield (
        DeviceKind,
        {"name": "a", "runs_on": "cpu", "flops_per_s": 1, "bytes_per_s": 1},
        {
            "name": NO_NAMES,
            "runs_on": (NAN, 0, True, object()),
            "computes": NO_FLAGS,
            "time_percent": integers(1, TOTAL),
            "flops_per_s": integers(1, platform.LARGEST_RATE, optional=True),
            "bytes_per_s": integers(1, platform.LARGEST_RATE, optional=True),
            "launch_ns": SIZE,
        },
    )
    budget = integers(1, 2**62, optional=True)
    yield Device, {}, {"name": NO_NAMES, "kind": NO_TEXT, "budget_bytes": budget}
    yield single_device, {}, {"budget_bytes": budget, "kind": NO_TEXT}
    yield (
        Link,
        {"source": 0, "target": 1, "bytes_per_s": 1},
        {
            "source": NO_INTEGERS,
            "target": NO_INTEGERS,
            "bytes_per_s": integers(1, platform.LARGEST_RATE),
            "latency_ns": SIZE,
        },
    )
    yield (
        MeasuredCost,
        {"device": "cpu", "operator": "mm", "cost_ns": 1},
        {
            "device": NO_TEXT,
            "operator": NO_TEXT,
            "cost_ns": integers(0, TOTAL, optional=True),
            "workspace_bytes": SIZE,
            "output_sizes_bytes": lists(SIZE),
            "aliases_input": NO_FLAGS,
            "samples": SIZE,
            "spread_ns": SIZE,
        },
    )
    yield MeasuredCosts, {}, {"operators": (*NO_LISTS, (1,), (COST, COST))}
    yield (
        Platform,
        {"devices": TWO.devices},
        {
            "devices": (*NO_LISTS, (), (1,)),
            "links": (*NO_LISTS, (1,), TWO.links * 2),
            "kinds": (*NO_LISTS, (1,)),
            "copies_wait": NO_FLAGS,
            "costs": (NAN, 3, "x", ()),
        },
    )
    numbers = (*NO_INTEGERS, None)
    steps = [
        *(
            kind(*pair)
            for kind in (Compute, Discard)
            for n in numbers
            for pair in [(n, 0), (0, n)]
        ),
        *(Copy(*[0] * at, n, *[0] * (2 - at)) for n in numbers for at in range(3)),
    ]
    yield (
        Schedule,
        {"steps": (Compute(0), Boundary())},
        {"steps": (*NO_LISTS, {}, (1,), (None,), *((step,) for step in steps))},
    )
    yield (
        simulate,
        {"graph": GRAPH, "platform": single_device(), "schedule": Schedule(())},
        dict.fromkeys(("graph", "platform", "schedule"), WRONG_TYPES),
    )
    yield (
        Problem,
        {"graph": GRAPH, "platform": TWO},
        {
            "graph": WRONG_TYPES,
            "platform": WRONG_TYPES,
        },
    )
    yield (
        Limits,
        {},
        {
            "deadline_s": (NAN, INF, "1", True, ()),
            "seed": integers(0, 2**31 - 1),
        },
    )
    yield (
        Proposal,
        {"status": Status.UNKNOWN},
        {
            "status": NO_WORDS,
            "stop_reason": NO_WORDS,
            "bound_ns": integers(0),
            "schedule": (NAN, 3, "x", Schedule(())),
        },
    )
    yield (
        EvictionRule,
        {},
        {
            "size_exponent": NO_EXPONENTS,
            "distance_exponent": NO_EXPONENTS,
            "ancestor_share": NO_SHARES,
            "spare_share": NO_SHARES,
        },
    )
    yield (
        ExecutionRule,
        {},
        {
            "size_exponent": NO_EXPONENTS,
            "distance_exponent": NO_EXPONENTS,
            "ancestor_share": NO_SHARES,
            "copy_percent": integers(1, 10**9),
            "limit_percent": integers(0, 100),
            "reserve_bytes": lists(SIZE),
        },
    )


def chain_records() -> Iterator[CASES]:
    flags = ("overwrites_inputs", "counts_gradients", "counts_inputs")
    yield conventions.MemoryConvention, {}, dict.fromkeys(flags, NO_FLAGS)
    sizes = ("saved_bytes", "forward_workspace_bytes", "backward_workspace_bytes")
    yield (
        stages.StageOption,
        {"forward_ns": 2, "backward_ns": 3},
        {
            "forward_ns": integers(0, TOTAL, optional=True),
            "backward_ns": SIZE,
            "needs_output": NO_FLAGS,
            **dict.fromkeys(sizes, SIZE),
        },
    )
    yield (
        stages.Stage,
        {"forward_ns": 2, "output_bytes": 1, "options": (OPTION,)},
        {
            "forward_ns": SIZE,
            "output_bytes": SIZE,
            "options": (*NO_LISTS, (), (1,), (STAGE,)),
            "gradient_bytes": integers(0, TOTAL, optional=True),
            "forward_workspace_bytes": SIZE,
            "name": NO_TEXT,
        },
    )
    yield (
        stages.StageChain,
        {"stages": (STAGE,)},
        {
            "stages": (*NO_LISTS, (), (1,), (OPTION,)),
            "input_bytes": (*SIZE, TOTAL),
            "input_gradient_bytes": (*SIZE, TOTAL),
            "turn_ns": SIZE,
            "turn_workspace_bytes": (*SIZE, TOTAL),
        },
    )
    entry = lists(SIZE)
    yield (
        stages.StageChain.of_lists,
        {"forward_ns": [1, 2], "backward_ns": [2, 4], "output_bytes": [3, 1]},
        {
            **dict.fromkeys(("forward_ns", "backward_ns", "output_bytes"), entry),
            "saved_bytes": (*(bad for bad in entry if bad is not None), [1]),
            "input_bytes": (*SIZE, TOTAL),
            "input_gradient_bytes": tuple(b for b in SIZE if b is not None),
        },
    )
    yield (
        stage_joins.StageJoin,
        {"branches": (CHAIN,)},
        {
            "branches": (*NO_LISTS, (), (1,), (STAGE,)),
            "turn_ns": SIZE,
            "turn_workspace_bytes": (*SIZE, TOTAL),
        },
    )
    times = dict.fromkeys(("write_ns", "read_ns"), SIZE)
    yield levels.StorageLevel, {"slots": 1}, {"slots": SIZE, **times}
    rates = integers(0, platform.LARGEST_RATE)
    yield (
        chains.HostLink,
        {"out_bytes_per_s": 1, "in_bytes_per_s": 1},
        {
            "out_bytes_per_s": rates,
            "in_bytes_per_s": rates,
            "out_latency_ns": SIZE,
            "in_latency_ns": SIZE,
        },
    )
    yield (
        blocks.Block,
        {"branches": BLOCK.branches, "output_bytes": 1},
        {
            "branches": (*NO_LISTS, (), (1,), (CHAIN,)),
            "output_bytes": SIZE,
            "merge_forward_ns": SIZE,
            "merge_backward_ns": SIZE,
            "gradient_bytes": integers(0, TOTAL, optional=True),
            "merge_needs_inputs": NO_FLAGS,
            "name": NO_TEXT,
        },
    )


def chain_functions() -> Iterator[CASES]:
    counts = integers(0)
    yield (
        revolve.repetition_number,
        {"steps": 5, "checkpoints": 2},
        {
            "steps": counts,
            "checkpoints": SOME,
        },
    )
    yield (
        revolve.extra_forwards,
        {"steps": 5, "checkpoints": 2},
        {
            "steps": counts,
            "checkpoints": counts,
        },
    )
    yield (
        revolve.first_checkpoint,
        {"steps": 5, "checkpoints": 2},
        {
            "steps": integers(2),
            "checkpoints": SOME,
        },
    )
    yield (
        revolve.revolve_forwards,
        {"length": 5, "slots": 2},
        {
            "length": counts,
            "slots": counts,
        },
    )
    chain = {"length": 5, "memory_units": 9, "convention": STRICT}
    bad = {"length": SOME, "memory_units": counts, "convention": WRONG_TYPES}
    yield revolve.chain_forwards, chain, bad
    huge = (2**53, 2**62, 2**64)
    yield revolve.plan_chain, chain, {**bad, "length": (*SOME, *huge)}
    for piece in (Piece(0, 0, 5, 0), Piece(0, 5, 5, 1), Piece(0, 0, 2**62, 3)):
        yield revolve.reverse_segment, {"piece": Piece(0, 0, 2, 1)}, {"piece": (piece,)}
    join = {"stage_costs": [[1, 2], [3]], "memory_units": 9, "convention": STRICT}
    costs = (
        *NO_LISTS,
        [],
        [[]],
        [3],
        *([[1], [cost]] for cost in SIZE),
        [[2**53] * 16] * 2,
    )
    bad = {"stage_costs": costs, "memory_units": counts, "convention": WRONG_TYPES}
    table = integers(0, 2**33)
    yield joins.plan_join, join, {**bad, "max_table_bytes": table}
    yield joins.plan_join_by_branch, join, bad
    yield reexecution.plan_two_turns, join, bad
    yield reexecution.plan_join_any_turns, join, {**bad, "turn_cost": SIZE}
    yield (
        joins.smallest_units,
        {"lengths": [2, 2], "convention": STRICT},
        {
            "lengths": (*lists((*SOME, 2**31)), []),
            "convention": WRONG_TYPES,
        },
    )
    length = integers(0, 2**20)
    per_stage = {"forward_ns": SIZE, "backward_ns": SIZE, "length": length}
    yield (
        levels.plan_hrevolve,
        {"length": 4, "levels": [LEVEL]},
        {
            **per_stage,
            "levels": (*NO_LISTS, [], [1], [CHAIN]),
            "max_table_bytes": table,
        },
    )
    disk = {"length": 4, "memory_slots": 1, "disk": LEVEL}
    yield (
        levels.plan_disk_revolve,
        disk,
        {
            **per_stage,
            "memory_slots": counts,
            "disk": WRONG_TYPES,
        },
    )
    request = {
        "budget_bytes": counts,
        "slots": integers(1, TOTAL),
        "beyond_persistence": NO_FLAGS,
        "max_table_bytes": table,
    }
    yield (
        rotor.plan_rotor,
        {"chain": CHAIN, "budget_bytes": 20},
        {
            "chain": WRONG_TYPES,
            **request,
        },
    )
    yield (
        stage_joins.plan_stage_join,
        {"join": JOIN, "budget_bytes": 20},
        {
            "join": WRONG_TYPES,
            **request,
        },
    )
    yield (
        rotor.least_budget,
        {"plan": lambda budget: budget or None, "most_bytes": 10},
        {"most_bytes": counts, "tolerance_bytes": counts},
    )
    yield (
        offload.plan_offload,
        {"chain": CHAIN, "budget_bytes": 20, "link": LINK},
        {
            "chain": WRONG_TYPES,
            "budget_bytes": counts,
            "link": WRONG_TYPES,
            "slots": integers(1, TOTAL),
            "candidates": integers(1, 10_000),
        },
    )
    yield (
        blocks.block_stage,
        {"block": BLOCK},
        {
            "block": WRONG_TYPES,
            "budgets": integers(2, 10_000),
        },
    )


def lower_set_cases() -> Iterator[CASES]:
    yield (
        lower_sets.ForwardGraph,
        {"memory_bytes": (1, 1), "cost": (1, 1), "edges": ((0, 1),)},
        {
            "memory_bytes": tuple((entry, 1) for entry in integers(0, 2**60 // 4)),
            "cost": tuple((entry, 1) for entry in integers(0, 2**60 - 1)),
            "edges": (*NO_LISTS, (0,), ((0,),), ((0, 2),), ((0, 1.0),), ((1, 1),)),
            "segment_bytes": tuple((entry, 1) for entry in integers(0, 2**60)),
            "owed": NO_WORDS,
            "names": (*NO_LISTS, (1, 2), ("a",)),
            "name": NO_TEXT,
        },
    )
    yield (
        programs.LowerSetQuery,
        {"budget_bytes": 9},
        {
            "budget_bytes": NO_INTEGERS,
            "objective": NO_WORDS,
            "charge_last": NO_FLAGS,
        },
    )
    size = integers(0)
    yield (
        lower_sets.Segmentation,
        {"segment_of": (0, 1), "overhead": 0, "peak_bytes": 1, "cached_bytes": 1},
        {
            "segment_of": lists(size),
            **dict.fromkeys(("overhead", "peak_bytes", "cached_bytes"), size),
            "is_optimal": NO_FLAGS,
        },
    )
    family = {f.name: getattr(FAMILY, f.name) for f in dataclasses.fields(FAMILY)}
    yield (
        families.Family,
        family,
        {
            "rows": (*WRONG_TYPES, np.zeros(3), np.zeros((3, 2), np.uint64)),
            "node_count": (*SOME, 65, 2**62, 2**64),
            "is_complete": NO_FLAGS,
            "label": NO_TEXT,
        },
    )
    whole = {"graph": FORWARD, "family": FAMILY}
    wrong = {"graph": WRONG_TYPES, "family": WRONG_TYPES}
    until = (NAN, INF, "1", True, ())
    options = {"refinements": integers(0), "deadline_s": until}
    yield (
        programs.sweep_lower_sets,
        {**whole, "queries": [QUERY]},
        {
            **wrong,
            "queries": (*NO_LISTS, [1], [None]),
            **options,
        },
    )
    yield (
        programs.plan_lower_sets,
        {**whole, "query": QUERY},
        {
            **wrong,
            "query": WRONG_TYPES,
            **options,
        },
    )
    yield (
        programs.smallest_budget,
        whole,
        {
            **wrong,
            "charge_last": NO_FLAGS,
            **options,
        },
    )
    masks = lists((*NO_INTEGERS, -1, 15, 8, 2**63, 2**64))
    yield (
        programs.segmentation_of_chain,
        {"graph": FORWARD, "masks": [1, 7]},
        {
            "graph": WRONG_TYPES,
            "masks": (*masks, [], [1], [7, 1]),
            "charge_last": NO_FLAGS,
        },
    )
    yield (
        families.family_of_masks,
        {"node_count": 3, "masks": [1], "label": "x"},
        {
            "node_count": integers(1, 2**15),
            "masks": masks,
            "label": NO_TEXT,
        },
    )
    yield families.members, {"mask": 3}, {"mask": integers(0)}
    yield (
        families.prefixes,
        {"graph": FORWARD, "order": [0, 1, 2]},
        {
            "graph": WRONG_TYPES,
            "order": (*lists((*NO_INTEGERS, -1, 3, 2**63)), [0, 1, 1], [0, 2, 1]),
        },
    )
    for choose in (families.all_lower_sets, choice.choose_family):
        yield (
            choose,
            {"graph": FORWARD, "cap": 9},
            {
                "graph": WRONG_TYPES,
                "cap": SOME,
            },
        )
    for choose in (choice.approximate_family, families.ancestor_sets):
        yield choose, {"graph": FORWARD}, {"graph": WRONG_TYPES}
    yield chen.chen_segmentation, whole, {**wrong, "charge_last": NO_FLAGS}
    segments = lists((*NO_INTEGERS, -1, 3, 2**63))
    segments = (*segments, (0, 0), (0, 2, 2), (0.0, 0, 0), (1, 0, 0))
    for weigh in (formula.overhead, formula.peak_bytes, canonical_schedule):
        yield (
            weigh,
            {"graph": FORWARD, "segment_of": (0, 0, 1)},
            {"segment_of": segments},
        )


def planning_cases() -> Iterator[CASES]:
    for label in ("slot_bytes",):
        yield ceil_slots, {"size_bytes": 3, label: 2}, {label: SOME}
    yield floor_slots, {"budget_bytes": 3, "slot_bytes": 2}, {"slot_bytes": SOME}
    yield round_up, {"size_bytes": 3, "granule_bytes": 2}, {"granule_bytes": SOME}
    sizes = (*integers(1, 2**62)[len(NO_INTEGERS) :], 1.5, 3.0, True, np.True_, NAN)
    yield (
        parse_budget,
        {"budget": 3},
        {
            "budget": (
                *sizes,
                "",
                "x",
                "12 Gib",
                "3 Gb",
                "1e9",
                "-3",
                "0",
                "nan",
                "1 ZB",
            )
        },
    )
    effort = {f.name: integers(0) for f in dataclasses.fields(LowerSetsEffort)}
    yield LowerSetsEffort, {}, effort
    yield (
        Candidate,
        {"rule": EvictionRule()},
        {
            "rule": WRONG_TYPES,
            "limit_percent": integers(0, 100),
            "segment_count": integers(1, optional=True),
        },
    )
    seed = integers(0, 2**31 - 1)
    planned = {"time_limit": NO_SECONDS, "seed": seed, "solver": NO_WORDS}
    yield (
        plan_graph,
        {"graph": GRAPH, "budget": 100, "solver": "store-all"},
        {
            "graph": WRONG_TYPES,
            "budget": (*sizes, "", "12 Gib", {"gpu": 100}, {"cpu": 100, "gpu": 100}),
            "platform": (NAN, 3, "x", ()),
            "fingerprint": NO_TEXT,
            "has_assumed_loss": NO_FLAGS,
            "settings": (NAN, 3, "x", [], ()),
            "progress": (*WRONG_TYPES,),
            "objective": NO_WORDS,
            **planned,
        },
    )
    curve = (*(n for n in integers(2, 10_000)), "x", ["x"], [1.5], [0], [True])
    yield (
        trade_off,
        {"graph": GRAPH, "budgets": 2, "solver": "store-all"},
        {
            "graph": WRONG_TYPES,
            "budgets": tuple(b for b in curve if not isinstance(b, tuple | np.ndarray)),
            **planned,
        },
    )
    yield (
        trade_off_on_devices,
        {"graph": GRAPH, "platform": TWO, "budgets": 2},
        {
            "graph": WRONG_TYPES,
            "platform": WRONG_TYPES,
            "budgets": tuple(b for b in curve if not isinstance(b, tuple | np.ndarray)),
            **planned,
        },
    )
    yield (
        solve_portfolio,
        {"problem": PROBLEM, "solvers": [StoreAll()]},
        {"objective": NO_WORDS},
    )


OPTIONS = {
    "objective": NO_WORDS,
    "rows": NO_WORDS,
    "mip_solver": NO_WORDS,
    "solver": NO_WORDS,
    "effort": WRONG_TYPES,
    "candidates": integers(1),
    "thresholds": lists(integers(0, 100)),
    "allowance_percents": (*lists(integers(0, 100)), ()),
    "sweeps": (*(b for b in lists(SOME)), (1,), (1, 2, 3), (-1, -1), (1, 0), (1, 1.0)),
    "default_time_limit_s": (*NO_SECONDS, None),
    "program_time_limit_s": (*NO_SECONDS, None),
    "time_limit_s": NO_SECONDS,
    "effort_ops": integers(0),
    "runs_per_op": integers(0),
    "bisection_count": integers(0),
    "improved_count": integers(0),
    "backward_ops_per_stage": integers(0, optional=True),
    "memory_slots": integers(1, optional=True),
}
"""What options of solvers cannot be; those that are not here are counts or flags."""


def solver_cases() -> Iterator[CASES]:
    """Yield every field of every solver."""
    for make in SOLVERS.values():
        bad: dict[str, Any] = {}
        for field in dataclasses.fields(make):
            is_flag = isinstance(field.default, bool)
            usual = NO_FLAGS if is_flag else SOME
            bad[field.name] = OPTIONS.get(field.name, usual)
        if make is GreedyEviction:
            bad["candidates"] = (*NO_LISTS, (), (1,), (None,))
        if make is LocalSearch:
            bad["starts"] = (*NO_LISTS, (1,), (None,))
            bad["enough_ns"] = integers(0)
            bad["effort"] = integers(0, MOST_EFFORT, optional=True)
        yield make, {}, bad


@cache
def every_case() -> tuple[tuple[str, Callable[..., Any], dict[str, Any], str], ...]:
    """Return name, function, arguments and what is wrong, of every case."""
    sources = (
        records,
        chain_records,
        chain_functions,
        lower_set_cases,
        planning_cases,
        solver_cases,
    )
    return tuple(
        (make.__name__, make, {**good, name: value}, name)
        for source in sources
        for make, good, bad in source()
        for name, values in bad.items()
        for value in values
    )


def is_clear(error: Exception) -> bool:
    """Whether an exception is one that this package raises on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = "remat" in last.filename and (last.line or "").startswith("raise")
    return isinstance(error, ValueError | TypeError) and is_raised and bool(str(error))


def accepted() -> Iterator[str]:
    """Yield what was accepted, or refused by something else than a clear error."""
    for name, make, arguments, wrong in every_case():
        try:
            shown = repr(arguments[wrong])[:80]
        except ValueError:
            shown = "an integer of thousands of digits"
        label = f"{name}({wrong}={shown})"
        sys.stderr.write(f"{label}\n")
        try:
            make(**arguments)
        except Exception as error:  # noqa: BLE001 - of the right kind, as is looked at
            if not is_clear(error):
                yield f"{label}: {type(error).__name__}: {error!s:.200}"
        else:
            yield f"{label}: accepted"


def test_nothing_that_makes_no_sense_is_accepted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_bad_arguments"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-3:]
    assert done.returncode == 0, f"after {last}"
    assert done.stdout == f"{len(every_case())} cases\n", done.stdout[-6000:]
    assert len(every_case()) >= 2_000


def public(package: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(package).items()
        if not name.startswith("_")
        and callable(value)
        and (inspect.isfunction(value) or dataclasses.is_dataclass(value))
    }


NAN_OPTION = {"forward_ns": 1, "backward_ns": 1, "saved_bytes": NAN}
LINE = [[1] * 3] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: chains.chain_forwards(8.5, 4, STRICT), "length is 8.5"),
        (lambda: chains.revolve_forwards(5.5, 2), "length is 5.5"),
        (lambda: chains.plan_two_turns([[1.5, 1.5]] * 2, 4, STRICT), "is 1.5; it must"),
        (lambda: chains.StageOption(**NAN_OPTION), "saved_bytes of .* is nan"),
        (
            lambda: chains.HostLink(out_bytes_per_s=NAN, in_bytes_per_s=1),
            "out_bytes_per_s of a host link is nan",
        ),
        (lambda: Storage(name="x", size_bytes=NAN), "size_bytes of storage 'x' is nan"),
        (
            lambda: DeviceKind(name="k", flops_per_s=1, bytes_per_s=NAN),
            "bytes_per_s of device kind 'k' is nan",
        ),
        (lambda: SOLVERS["checkmate"](rows="foo"), "rows of .* 'published', 'tight'"),
        (lambda: SOLVERS["checkmate"](mip_solver="hihgs"), "mip_solver of .* 'highs'"),
        (lambda: SOLVERS["checkmate"](memory_slots=0), "memory_slots of .* is 0"),
        (lambda: SOLVERS["checkmate"](threads=-1), "threads of .* is -1"),
        (lambda: SOLVERS["xengine"](sweeps=(-1, -1)), "entry 0 of sweeps .* is -1"),
        (lambda: DeviceSearch(candidates=-1), "candidates of DeviceSearch is -1"),
        (lambda: Limits(seed="a"), "seed is 'a'; it must be an integer"),
        (
            lambda: plan_graph(GRAPH, budget=100, objective="overlap"),
            "objective is 'overlap'; it must be one of 'serial', 'overlapped'",
        ),
        (lambda: programs.segmentation_of_chain(FORWARD, [15]), "holds value 3"),
        (lambda: programs.segmentation_of_chain(FORWARD, [-1]), "sets is -1"),
        (lambda: revolve.first_checkpoint(5, 0), "checkpoints is 0"),
        (lambda: revolve.repetition_number(5, 0), "checkpoints is 0"),
        (lambda: chains.plan_offload(CHAIN, -1, LINK), "budget_bytes is -1"),
        (lambda: chains.plan_join(LINE, "5", STRICT), "memory_units is '5'"),
        (lambda: chains.plan_join(None, 5, STRICT), "stage_costs is None"),
        (lambda: chains.plan_rotor(CHAIN, NAN), "budget_bytes is nan"),
        (lambda: parse_budget("12 Gib"), "unit of bits; for bytes write 12 GiB"),
    ],
)
def test_the_message_names_what_is_wrong(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**64])
def test_sizes_beyond_the_core_never_reach_it(size: int) -> None:
    for name in ("input_bytes", "turn_workspace_bytes", "turn_ns"):
        with pytest.raises(ValueError, match=f"{name} of a chain is"):
            dataclasses.replace(CHAIN, **{name: size})
    # A budget of any size is as good as one for everything.
    assert rotor.plan_rotor(CHAIN, size) == rotor.plan_rotor(CHAIN, TOTAL)
    plan = stage_joins.plan_stage_join(JOIN, size)
    assert plan == stage_joins.plan_stage_join(JOIN, TOTAL)


def test_memory_beyond_everything_is_no_more_work() -> None:
    lines = [[1] * 20] * 2
    plans = [
        joins.plan_join_by_branch(lines, units, conventions.IN_PLACE)
        for units in (100, 10**6, 2**64)
    ]
    assert [plan.memory_units for plan in plans if plan] == [100, 10**6, 2**64]
    assert len({plan.operations for plan in plans if plan}) == 1
    assert revolve.repetition_number(2**64, 2) < 2**33
    for many in (2**31, 2**62):
        with pytest.raises(SolverUnsuitableError, match="operations or more"):
            revolve.plan_chain(many, 9, STRICT)


def test_the_words_of_options_are_taken_for_their_members() -> None:
    published = SOLVERS["checkmate"](rows="published", mip_solver="highs")
    made = SOLVERS["checkmate"](rows=Rows.PUBLISHED, mip_solver=MipSolver.HIGHS)
    assert published == made
    assert DeviceSearch(objective="overlapped").objective is Objective.OVERLAPPED
    plan = plan_graph(GRAPH, budget=100, objective="serial", solver="store-all")
    assert plan.solver == "StoreAll"


# What the programs return: no caller makes them.
ANSWERS = {
    *("Backward", "BlockStage", "ChainPlan", "Forward", "LevelPlan", "Load"),
    *("OffloadPlan", "StageJoinPlan", "Store", "Turn", "UnitPlan"),
}


@pytest.mark.parametrize("package", [algorithms, chains, lower_sets, solver_table])
def test_everything_public_is_given_bad_arguments(package: ModuleType) -> None:
    driven = {name for name, *_ in every_case()} | ANSWERS
    # What has no argument, and what the names of solvers are checked by.
    apart = {"ChenSqrt", "StoreAll", "chosen_solvers", "solver_name"}
    assert public(package) - driven - apart == set()


def test_valid_arguments_are_accepted() -> None:
    sources = (records, chain_records, chain_functions, lower_set_cases)
    for source in (*sources, planning_cases, solver_cases):
        for make, good, _ in source():
            make(**good)


def test_integers_of_numpy_are_kept_as_python_has_them() -> None:
    storage = Storage(name="x", size_bytes=np.int64(3), home=np.uint8(1))
    assert type(storage.size_bytes) is type(storage.home) is int
    assert DeviceSearch(candidates=np.int32(7)) == DeviceSearch(candidates=7)
    assert lower_sets.plan_lower_sets(FORWARD, FAMILY, QUERY).overhead >= 0


if __name__ == "__main__":
    found = list(accepted())
    for line in found:
        sys.stdout.write(f"{line}\n")
    if not found:
        sys.stdout.write(f"{len(every_case())} cases\n")
