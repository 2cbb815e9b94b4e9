"""Many models through ``fit`` at 60 % of their peak: what trains, what is refused.

``python -m studies.many_models [names...]`` fits each definition in a process of its
own, with one thread and a time limit, verifies what was planned, and adds a line to
``studies/results/many_models.jsonl``. A model is planned as one graph. Where that is
refused with the advice to give ``regions="breaks"``, it is planned so. Where the budget
is refused, the smallest budget that the error names is tried. ``--tables`` writes the
newest line of each into ``docs/studies.md``. A definition whose library is not
installed is skipped by name.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.definitions import Definition, Example, definitions, is_installed
from studies.fresh_process import STEADY_ALLOCATION, run_module

STUDY = "many_models"
BUDGET = "60%"
BREAKS = 'regions="breaks"'
"""How an error names the way to plan several graphs."""

TRAINED = "trained"
SMALLEST = "refused; the smallest budget works"
REFUSED = "refused by name"
OVER = "over the budget"
WRONG = "not bitwise"
UNTRUE = "the smallest budget does not work"
OUTCOMES = (TRAINED, SMALLEST, REFUSED, OVER, WRONG, UNTRUE)
"""What may become of a model, besides ``"failed"`` and ``"timed out"``."""


def study(definition: Definition) -> dict[str, Any]:
    """Fit and verify one definition in this process; return its line."""
    example = made(definition)
    regions = "whole"
    line = {**described(definition), **attempt(example, regions)}
    if line["status"] == REFUSED and BREAKS in line["message"]:
        refused = line["message"]
        regions = "breaks"
        line |= {"message": "", "one_graph": refused} | attempt(example, regions)
    if line["status"] == SMALLEST:
        line |= smallest(example, regions, line["required_bytes"])
    return line | {"regions": regions}


def made(definition: Definition) -> Example:
    """Return the example of a definition; its weights and batch are always the same."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    return definition.build()


def described(definition: Definition) -> dict[str, Any]:
    return {
        "study": STUDY,
        "name": definition.name,
        "library": definition.library,
        "provenance": definition.source,
    }


def attempt(
    example: Example, regions: Any, budget: str | int = BUDGET
) -> dict[str, Any]:
    """Fit, run, compare and release; return what became of it."""
    import torch  # noqa: PLC0415

    import remat  # noqa: PLC0415
    from remat.core.errors import RematError  # noqa: PLC0415
    from remat.training.fitted_model import fitted_on  # noqa: PLC0415

    optimizer = torch.optim.SGD(example.model.parameters(), lr=1e-3)
    given = example.model, example.args, example.kwargs
    started_s = time.perf_counter()
    try:
        plan = remat.fit(*given, budget=budget, optimizer=optimizer, regions=regions)
        planning_s = time.perf_counter() - started_s
        found = compared(example, optimizer, regions)
        # What sets itself up in the first call takes another way from then on.
        fitted = fitted_on(example.model)
        assert fitted is not None
        plan = fitted.latest_plan()
    except remat.BudgetError as error:
        return {
            "status": SMALLEST,
            "budget_bytes": error.budget_bytes,
            "required_bytes": error.required_bytes,
            "message": str(error),
        }
    except RematError as error:
        return {
            "status": REFUSED,
            "error": type(error).__name__,
            "message": str(error),
        }
    finally:
        remat.release(example.model)
    measured_bytes = found["measured_peak_bytes"]
    if measured_bytes > plan.budget_bytes:
        found["status"] = OVER
    return {
        "planning_s": round(planning_s, 2),
        "overhead": plan.overhead,
        "op_count": len(plan.graph.ops),
        "budget_bytes": plan.budget_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "prediction_error": plan.peak_bytes / measured_bytes - 1,
        **found,
    }


def compared(example: Example, optimizer: Any, regions: Any) -> dict[str, Any]:
    """Return what steps of the fitted model make and take, beside other steps."""
    from remat.profile.memory import measure  # noqa: PLC0415
    from remat.training.fitted_model import fitted_on  # noqa: PLC0415
    from remat.training.fitted_regions import fitted_for  # noqa: PLC0415
    from remat.training.request import PlanRequest  # noqa: PLC0415
    from remat.training.verification import TrainingStep, compare  # noqa: PLC0415

    fitted = fitted_on(example.model)
    step = TrainingStep(example.model, example.args, example.kwargs, None, optimizer)
    reference = PlanRequest(
        budget=2**62, solver="store-all", costs="estimated", regions=regions
    )
    with step.restored():
        mine = step.outcome(fitted, 1)
        eager = step.outcome(None, 1)
        captured = step.outcome(fitted_for(example.model, reference), 1)
        against = compare(captured, mine)

        def peak_bytes(called: Any) -> int:
            # Each step draws what the planned one drew: where boxes, experts or masks
            # are drawn, others may be larger or smaller.
            for _ in range(2):
                fresh_step(step, called)
            return measure(
                lambda: fresh_step(step, called),
                warmup=2,
                repeats=0,
                resident=step.resident,
            ).peak_bytes

        return {
            "status": WRONG if against else TRAINED,
            "compared_count": len(mine),
            "against_captured": _worst(against),
            "against_eager": _worst(compare(eager, mine)),
            "plain_peak_bytes": peak_bytes(None),
            "measured_peak_bytes": peak_bytes(fitted),
        }


def fresh_step(step: Any, called: Any) -> None:
    """Run a training step from the start."""
    step.reset()
    step.train(called)


def _worst(differences: Sequence[Any]) -> dict[str, Any]:
    worst = max(differences, key=lambda found: found.largest, default=None)
    return {
        "count": len(differences),
        "worst": worst and worst.name,
        "largest": worst and worst.largest,
    }


def smallest(example: Example, regions: str, required_bytes: int) -> dict[str, Any]:
    """Return whether the smallest budget that an error named works."""
    line = attempt(example, regions, required_bytes)
    works = line["status"] == TRAINED
    return {
        **line,
        "status": SMALLEST if works else UNTRUE,
        "at_smallest": line["status"],
    }


def missing(definition: Definition) -> str:
    """Return in words why a definition cannot be made here, or ``""``."""
    is_there = is_installed(definition.library)
    return "" if is_there else f"{definition.library} is not installed"


def run(names: Sequence[str], results: Path, limit_s: int) -> None:
    """Study definitions, each in a process of its own, and record a line of each."""
    found = definitions()
    for name in names:
        reason = missing(found[name])
        if reason:
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            ended = run_module(
                "studies.many_models",
                ["--child", name, "--results", str(results)],
                limit_s=limit_s,
                variables=STEADY_ALLOCATION
                | {"REMAT_CACHE_DIR": f"{folder}/costs", "OMP_NUM_THREADS": "1"},
            )
        if not ended.is_ok:
            line = described(found[name]) | ended.line(name)
            del line["case"]
            record(line, results)


def record(line: dict[str, Any], results: Path) -> None:
    """Print a line and add it, with what it was measured on, to the results."""
    from studies.record import append, environment  # noqa: PLC0415

    path = results / f"{STUDY}.jsonl"
    append(path, line | {"versions_of": _version(line["library"])} | environment())
    print(brief(line), flush=True)


def _version(library: str) -> str:
    from importlib.metadata import version  # noqa: PLC0415

    return f"{library} {version(library)}"


def brief(line: Mapping[str, Any]) -> str:
    """Return what a person wants to see at once."""
    text = f"{line['name']} ({line.get('regions', '?')}): {line['status']}"
    if "measured_peak_bytes" in line:
        share = line["measured_peak_bytes"] / line["plain_peak_bytes"]
        whole = line["baseline_peak_bytes"] / line["plain_peak_bytes"]
        text += (
            f", {share:.0%} of plain (all kept: {whole:.1%}), predicted "
            f"{line['prediction_error']:+.2%}, eager {line['against_eager']['count']} differ, {line['planning_s']} s"
        )
    message = line.get("message", "")
    return text + (f"\n    {message[-600:]}" if message else "")


def parser() -> argparse.ArgumentParser:
    from studies.record import RESULTS  # noqa: PLC0415

    found = argparse.ArgumentParser(
        prog="python -m studies.many_models", description=__doc__
    )
    found.add_argument("names", nargs="*", metavar="NAME")
    found.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    found.add_argument("--limit", type=int, default=240, metavar="SECONDS")
    found.add_argument("--tables", action="store_true", help="write the tables only")
    found.add_argument("--child", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Study what is named, or all; or write the tables."""
    given = parser()
    options = given.parse_args(arguments)
    if options.child:
        run_child(options.child, options.results)
        return 0
    if options.tables:
        from studies.breaks_tables import fill_page  # noqa: PLC0415

        fill_page(options.results)
        return 0
    unknown = [name for name in options.names if name not in definitions()]
    if unknown:
        given.error(
            f"there is no definition {unknown[0]}; see studies/definitions_*.py"
        )
    run(options.names or list(definitions()), options.results, options.limit)
    return 0


def run_child(name: str, results: Path) -> None:
    """Study one definition in this process."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record(study(definitions()[name]), results)


if __name__ == "__main__":
    sys.exit(main())
