"""Chains and joins in the abstract: agreement, exactness, planning speed, curves.

``python -m studies.chains [case ...]`` adds lines to ``studies/results/chains.jsonl``.
No model is trained; random instances have fixed seeds.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from typing import Any

from remat.algorithms.chains import level_tables, rotor_tables
from remat.algorithms.chains.blocks import Block, block_stage
from remat.algorithms.chains.conventions import IN_PLACE, STRICT, MemoryConvention
from remat.algorithms.chains.joins import plan_join, plan_join_by_branch
from remat.algorithms.chains.levels import (
    StorageLevel,
    plan_disk_revolve,
    plan_hrevolve,
)
from remat.algorithms.chains.reexecution import plan_two_turns
from remat.algorithms.chains.revolve import chain_forwards, plan_chain
from remat.algorithms.chains.rotor import chain_numbers, plan_rotor, slot_size
from remat.algorithms.chains.stage_joins import StageJoin, plan_stage_join
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.units import floor_slots
from remat.testing.chain_oracles import best_chain, best_stage_join
from studies.record import RESULTS, ROOT, append, environment

PAPERS = ROOT.parent / "shared" / "papers"

Line = dict[str, Any]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and answer of a call; the best of three where it is short."""
    best, answer = float("inf"), None
    for _ in range(3):
        start = time.perf_counter()
        answer = call()
        best = min(best, time.perf_counter() - start)
        if best > 2:
            break
    return best, answer


# --- instances -----------------------------------------------------------------------


def random_chain(rng: random.Random, length: int) -> StageChain:
    """Return a chain as those of the published tables: one option, sizes 1 to 3."""
    stages: list[Stage] = []
    for _ in range(length):
        forward, output = rng.randint(1, 5), rng.randint(1, 3)
        option = StageOption(
            forward_ns=forward, backward_ns=2 * forward, saved_bytes=rng.randint(0, 3)
        )
        stages.append(Stage(forward_ns=forward, output_bytes=output, options=(option,)))
    size = rng.randint(1, 3)
    return StageChain(stages=tuple(stages), input_bytes=size, input_gradient_bytes=size)


def large_chain(length: int, *, option_count: int = 1) -> StageChain:
    """Return a chain of sizes and times as of a network, without a common divisor."""
    rng = random.Random(length)  # noqa: S311 - instances, not secrets
    stages: list[Stage] = []
    for _ in range(length):
        forward, output = rng.randint(10**5, 10**6), rng.randint(10**6, 10**7)
        options = tuple(
            StageOption(
                forward_ns=forward,
                backward_ns=2 * forward + k * forward // 3,
                saved_bytes=rng.randint(2, 6) * output // (k + 1),
            )
            for k in range(option_count)
        )
        stages.append(Stage(forward_ns=forward, output_bytes=output, options=options))
    return StageChain(stages=tuple(stages), input_bytes=10**6)


# --- cases ---------------------------------------------------------------------------


def oracle_agreement() -> Iterator[Line]:
    """Compare with the tables of exhaustive searches, where they are."""
    if not (PAPERS / "join_oracle.json").is_file():
        return
    text = (PAPERS / "join_oracle.json").read_text(encoding="utf-8")
    for label, shapes in json.loads(text)["once"].items():
        mode, gradients, inputs = label.split("|")
        convention = MemoryConvention(
            overwrites_inputs=mode == "inplace",
            counts_gradients=gradients == "grads=counted",
            counts_inputs=inputs == "inputs=counted",
        )
        searched = equal = 0
        for shape, values in shapes.items():
            costs = [[1] * int(length) for length in shape.split(",")]
            for units, (expected, tag) in values.items():
                if tag == "bf":
                    plan = plan_join(costs, int(units), convention)
                    found = None if plan is None else plan.forward_cost
                    searched += 1
                    equal += found == expected
        yield {"convention": label, "searched": searched, "equal": equal}


def rotor_exactness() -> Iterator[Line]:
    """Rotor, persistent and beyond, against the optimum over all schedules."""
    for length, count in ((2, 60), (3, 60), (4, 40), (5, 12), (6, 3)):
        rng = random.Random(length)  # noqa: S311 - instances, not secrets
        rows: list[tuple[int | None, int | None, int]] = []
        for _ in range(count):
            chain = random_chain(rng, length)
            total = sum(chain.all_sizes)
            for budget in range(total // 2, total + total // 3, 1 + length // 2):
                best = best_chain(chain, budget)
                if best is None:
                    continue
                plans = (
                    plan_rotor(chain, budget, beyond_persistence=beyond)
                    for beyond in (False, True)
                )
                costs = [None if plan is None else plan.cost_ns for plan in plans]
                rows.append((costs[0], costs[1], best))
        for index, name in enumerate(("persistent", "beyond persistence")):
            yield {"length": length, "program": name} | shares(
                [(row[index], row[2]) for row in rows]
            )


def shares(rows: Sequence[tuple[int | None, int]]) -> Line:
    """Return how often answers are optimal, and how far they are off."""
    found = [(cost, best) for cost, best in rows if cost is not None]
    ratios = [cost / best for cost, best in found]
    return {
        "instances": len(rows),
        "infeasible": len(rows) - len(found),
        "exact": sum(cost == best for cost, best in found),
        "mean_ratio": sum(ratios) / len(ratios),
        "worst_ratio": max(ratios),
    }


def stage_join_exactness() -> Iterator[Line]:
    """Compare joins of two short chains of stages with the optimum with one turn."""
    rng = random.Random(7)  # noqa: S311 - as above
    rows: list[tuple[int | None, int]] = []
    proved = 0
    for _ in range(30):
        join = StageJoin(
            branches=tuple(random_chain(rng, rng.randint(1, 2)) for _ in range(2))
        )
        total = sum(join.all_sizes)
        for budget in range(total // 2, total + 3, 2):
            best = best_stage_join(join, budget)
            if best is None:
                continue
            plan = plan_stage_join(join, budget)
            rows.append((None if plan is None else plan.cost_ns, best))
            proved += plan is not None and plan.least_ns == plan.cost_ns
    yield shares(rows) | {"cheapest_candidate_fits": proved}


def two_turns() -> Iterator[Line]:
    """Compare one turn with two, at the tightest budgets of two equal branches."""
    for length in (2, 4, 6, 8, 10, 12, 16, 20):
        costs = [[1] * length] * 2
        for units in (4, 5, 6, 7):
            once = plan_join(costs, units, IN_PLACE)
            twice = plan_two_turns(costs, units, IN_PLACE)
            yield {
                "lengths": [length, length],
                "units": units,
                "one_turn": None if once is None else once.forward_cost,
                "two_turns": None if twice is None else twice.forward_cost,
            }


def trunk_exactness() -> Iterator[Line]:
    """Compare joins with a trunk, planned as chains with a block, with the optimum."""
    if not (PAPERS / "join_oracle.json").is_file():
        return
    text = (PAPERS / "join_oracle.json").read_text(encoding="utf-8")
    option = StageOption(forward_ns=None, backward_ns=0, needs_output=False)
    unit = Stage(forward_ns=1, output_bytes=1, options=(option,))
    rows: list[tuple[int | None, int]] = []
    for key, values in json.loads(text)["trunk"]["strict"].items():
        shape, trunk = key.split("|m=")
        branches = tuple(
            StageChain(stages=(unit,) * int(length)) for length in shape.split(",")
        )
        block = Block(branches=branches, output_bytes=1, merge_forward_ns=1)
        stages = (block_stage(block).stage, *[unit] * int(trunk))
        chain = StageChain(stages=stages, input_bytes=len(branches))
        for units, best in values.items():
            if best is not None:
                plan = plan_rotor(chain, int(units))
                rows.append((None if plan is None else plan.cost_ns, best))
    yield shares(rows)


def peer_speed() -> Iterator[Line]:
    """Planning time side by side with checkpoint_schedules, where it is installed."""
    if find_spec("checkpoint_schedules") is None:
        return
    root = "checkpoint_schedules.hrevolve_sequences"
    revolve = import_module(f"{root}.revolve").revolve
    disk_revolve = import_module(f"{root}.disk_revolve").disk_revolve
    hrevolve = import_module(f"{root}.hrevolve").hrevolve
    disk = StorageLevel(slots=20, write_ns=5, read_ns=5)
    sys.setrecursionlimit(10**5)
    for length in (100, 300, 1000, 2000):
        # The peer's arguments: costs of reading and writing, then of the stages.
        pairs: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
            (
                "Revolve, 10 slots",
                lambda n=length: plan_chain(n, 12, IN_PLACE),
                lambda n=length: revolve(n, 10, (0, 5), (0, 5), 1, 1),
            ),
            (
                "DiskRevolve, 10 slots",
                lambda n=length: plan_disk_revolve(n, 10, disk),
                lambda n=length: disk_revolve(n, 10, 5, 5, 1, 1),
            ),
            (
                "HRevolve, 5 and 20 slots",
                lambda n=length: plan_hrevolve(n, [StorageLevel(slots=5), disk]),
                lambda n=length: hrevolve(n, (5, 20), (0, 5), (0, 5), 1, 1),
            ),
        ]
        for name, ours, theirs in pairs:
            own_s, _ = timed(ours)
            try:
                peer_s, _ = timed(theirs)
            except (TypeError, KeyError, RecursionError) as error:
                yield {"length": length, "program": name, "peer_error": str(error)}
                continue
            yield {
                "length": length,
                "program": name,
                "own_s": own_s,
                "peer_s": peer_s,
                "ratio": peer_s / own_s,
            }


def twin_speed() -> Iterator[Line]:
    """Planning time of the native core and of its Python twins."""
    for length, slots in ((10, 50), (20, 100), (40, 100)):
        chain = large_chain(length)
        budget = sum(chain.all_sizes) // 3
        slot = slot_size(chain, budget, slots)
        arguments = (chain_numbers(chain), slot, floor_slots(budget, slot), False)
        native_s, fast = timed(lambda a=arguments: rotor_tables.rotor_plan(*a))
        twin_s, slow = timed(lambda a=arguments: unwrap(rotor_tables.rotor_plan)(*a))
        yield {
            "program": "Rotor, persistent",
            "length": length,
            "slots": slots,
            "native_s": native_s,
            "twin_s": twin_s,
            "ratio": twin_s / native_s,
            "equal": fast == slow,
        }
    levels = (200, [3, 10], [0, 5], [0, 5], 1, 1)
    native_s, fast = timed(lambda: level_tables.hrevolve_plan(*levels))
    sys.setrecursionlimit(10**5)
    twin_s, slow = timed(lambda: unwrap(level_tables.hrevolve_plan)(*levels))
    yield {
        "program": "HRevolve",
        "length": 200,
        "native_s": native_s,
        "twin_s": twin_s,
        "ratio": twin_s / native_s,
        "equal": fast == slow,
    }


def planning_time() -> Iterator[Line]:
    """Planning time of large instances."""
    for length in (50, 100, 200, 300):
        chain = large_chain(length)
        budget = sum(chain.all_sizes) // 4
        for beyond in (False, True):
            seconds, plan = timed(
                lambda c=chain, m=budget, b=beyond: plan_rotor(
                    c, m, beyond_persistence=b
                )
            )
            yield {
                "program": "Rotor beyond persistence" if beyond else "Rotor",
                "lengths": [length],
                "slots": 500,
                "seconds": seconds,
                "overhead": plan.cost_ns / chain.least_ns,
            }
    for lengths, units in (
        ((200, 200), 20),
        ((300, 300), 40),
        ((300, 200), 40),
        ((30, 30, 30), 16),
        ((40, 30, 20), 20),
        ((20, 20, 20, 20), 16),
    ):
        costs = [[1] * length for length in lengths]
        for program in (plan_join, plan_join_by_branch):
            seconds, plan = timed(lambda p=program, c=costs, u=units: p(c, u, STRICT))
            yield {
                "program": program.__name__,
                "lengths": lengths,
                "units": units,
                "seconds": seconds,
                "forward_count": plan.forward_cost,
            }
    for lengths in ((12, 12), (24, 24), (12, 12, 12)):
        join = StageJoin(branches=tuple(large_chain(length) for length in lengths))
        budget = sum(join.all_sizes) // 4
        seconds, plan = timed(lambda j=join, m=budget: plan_stage_join(j, m, slots=200))
        yield {
            "program": "plan_stage_join",
            "lengths": lengths,
            "slots": 200,
            "seconds": seconds,
            "overhead": plan.cost_ns / join.least_ns,
        }


def join_curves() -> Iterator[Line]:
    """Forward count over memory: the join program and what people do without it."""
    for lengths in ((20, 20), (50, 50), (20, 10), (20, 20, 20)):
        k, costs = len(lengths), [[1] * length for length in lengths]
        for units in range(2 * k, sum(lengths) + k + 1):
            plan = plan_join(costs, units, IN_PLACE)
            one_by_one = plan_join_by_branch(costs, units, IN_PLACE)
            yield {
                "lengths": lengths,
                "units": units,
                "convention": "in place, everything counts",
                "stages": sum(lengths),
                "optimum": None if plan is None else plan.forward_cost,
                "branch_by_branch": (
                    None if one_by_one is None else one_by_one.forward_cost
                ),
                "lock_step": lock_step(lengths, units),
                "static_split": static_split(lengths, units),
            }


def lock_step(lengths: Sequence[int], units: int) -> int | None:
    """Return the count of one chain whose values are those of all branches."""
    count = chain_forwards(max(lengths), units // len(lengths), IN_PLACE)
    return None if count is None else len(lengths) * count


def static_split(lengths: Sequence[int], units: int) -> int | None:
    """Return the best count of branches that have a fixed share of memory each."""
    best: dict[int, int] = {0: 0}
    for length in lengths:
        after: dict[int, int] = {}
        for used, cost in best.items():
            for own in range(units - used + 1):
                count = chain_forwards(length, own, IN_PLACE)
                if count is not None:
                    total = cost + count
                    after[used + own] = min(after.get(used + own, total), total)
        best = after
    return min(best.values(), default=None)


CASES: dict[str, Callable[[], Iterator[Line]]] = {
    case.__name__: case
    for case in (
        oracle_agreement,
        rotor_exactness,
        stage_join_exactness,
        trunk_exactness,
        two_turns,
        peer_speed,
        twin_speed,
        planning_time,
        join_curves,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.chains")
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    for name in options.cases or CASES:
        for line in CASES[name]():
            full = {"study": "chains", "case": name} | line
            print(json.dumps(full), flush=True)
            append(options.results / "chains.jsonl", full | environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
