"""Run the studies and add their lines to ``studies/results``.

``python -m studies.run budgets|overhead|peers`` measures every model, each in a fresh
process. Lines are written as they come; what was recorded with the same sources is
skipped, so that an interrupted study goes on where it stopped.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies.fresh_process import STEADY_ALLOCATION, run_module
from studies.record import (
    RESULTS,
    append,
    environment,
    read,
    source_digest,
)

STUDIES = ("budgets", "overhead", "peers")
MODELS = (
    "resnet50",
    "gpt2",
    "unet",
    "bert",
    "vgg19",
    "densenet121",
    "vit",
    "t5",
    "llama",
    "mamba",
)
REPEATS = {"budgets": 3, "overhead": 9, "peers": 3}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m studies.run", description=__doc__)
    found.add_argument("study", choices=STUDIES)
    found.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    found.add_argument("--tiny", action="store_true", help="the small variants")
    found.add_argument(
        "--scale", type=int, default=1, help="multiplies width and batch"
    )
    found.add_argument("--threads", type=int, help="default: as many as cores")
    found.add_argument("--repeats", type=int, help="timed pairs of steps")
    found.add_argument("--cases", nargs="+", help="only these budgets or peers")
    found.add_argument(
        "--skip",
        choices=("same-sources", "recorded", "nothing"),
        default="same-sources",
        help="what not to measure again (default: same-sources)",
    )
    found.add_argument("--limit", type=int, default=600, help="seconds for a process")
    found.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    found.add_argument("--child", help=argparse.SUPPRESS)
    found.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.repeats is None:
        options.repeats = REPEATS[options.study]
    if options.child:
        run_child(options)
        return 0
    for model in options.models:
        if options.study == "peers":
            run_peers(options, model)
        elif wanted(options, model, planned_cases(options)):
            start(options, model, "all")
    return 0


def planned_cases(options: argparse.Namespace) -> list[str]:
    if options.study == "overhead":
        return ["100%"]
    from studies.planned import FRACTIONS  # noqa: PLC0415

    return options.cases or [f"{fraction:.0%}" for fraction in FRACTIONS]


def run_peers(options: argparse.Namespace, model: str) -> None:
    """Measure each peer, then remat at the smallest peak of each family of peers."""
    from studies.peers import CASES, family  # noqa: PLC0415

    for case in options.cases or CASES:
        if wanted(options, model, [case]):
            start(options, model, case)
    smallest: dict[str, int] = {}
    for line in recorded(options, model):
        if line["status"] == "ok" and not line["case"].startswith("remat"):
            peak_bytes = line["measured_peak_bytes"]
            key = family(line["case"])
            smallest[key] = min(peak_bytes, smallest.get(key, peak_bytes))
    for key, budget in smallest.items():
        case = f"remat at {key}"
        if wanted(options, model, [case], budget):
            start(options, model, case, budget)


def recorded(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Return what is recorded of a model in this study with these settings."""
    return [
        line
        for line in read(results_file(options))
        if line["model"] == model
        and line["settings"]["model"] == model_options(options)
    ]


def wanted(
    options: argparse.Namespace,
    model: str,
    cases: Iterable[str],
    budget: int | None = None,
) -> bool:
    """Whether any of the cases has still to be measured, or was at another budget."""
    if options.skip == "nothing":
        return True
    digest = source_digest()
    done = {
        line["case"]
        for line in recorded(options, model)
        if line["status"] != "failed"
        and (options.skip == "recorded" or line["source"] == digest)
        and (budget is None or line.get("budget_bytes") == budget)
    }
    return any(case not in done for case in cases)


def start(
    options: argparse.Namespace, model: str, case: str, budget: int | None = None
) -> None:
    """Measure in a fresh process; record a failure if it does not end well."""
    command = [options.study, "--child", case]
    command += ["--models", model, "--scale", str(options.scale)]
    command += ["--repeats", str(options.repeats), "--results", str(options.results)]
    if options.tiny:
        command.append("--tiny")
    if options.threads:
        command += ["--threads", str(options.threads)]
    if options.cases and case == "all":
        command += ["--cases", *options.cases]
    if budget is not None:
        command += ["--budget-bytes", str(budget)]
    note(f"{options.study}: {model}, {case}")
    with tempfile.TemporaryDirectory() as folder:
        ended = run_module(
            "studies.run",
            command,
            limit_s=options.limit,
            variables=STEADY_ALLOCATION
            | {
                "REMAT_CACHE_DIR": f"{folder}/costs",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            },
        )
    if not ended.is_ok:
        report(options, model, ended.line(case))


def run_child(options: argparse.Namespace) -> None:
    """Measure one model in this process."""
    import torch  # noqa: PLC0415

    if options.threads:
        torch.set_num_threads(options.threads)
    for line in measure(options):
        report(options, options.models[0], line)


def measure(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    from studies import models, peers, planned  # noqa: PLC0415

    (model,) = options.models
    sizes = models.Options(tiny=options.tiny, scale=options.scale)
    if options.study == "budgets":
        cases = options.cases or [f"{fraction:.0%}" for fraction in planned.FRACTIONS]
        fractions = [int(case.removesuffix("%")) / 100 for case in cases]
        yield from planned.study_budgets(model, sizes, fractions, options.repeats)
    elif options.study == "overhead":
        yield planned.study_overhead(model, sizes, options.repeats)
    elif options.budget_bytes is not None:
        yield peers.study_same_peak(
            model, options.child, options.budget_bytes, sizes, options.repeats
        )
    else:
        yield peers.study_peer(model, options.child, sizes, options.repeats)


def report(options: argparse.Namespace, model: str, line: dict[str, Any]) -> None:
    """Print a line and add it, with what it was measured on, to the results."""
    settings = {"model": model_options(options), "repeats": options.repeats}
    full = {"study": options.study, "model": model, **line}
    append(results_file(options), full | {"settings": settings} | environment())
    note("  " + "  ".join(brief(line)))


def brief(line: dict[str, Any]) -> Iterable[str]:
    """Yield what a person wants to see at once."""
    yield f"{line['case']}: {line['status']}"
    for key, value in line.items():
        if key.endswith("peak_bytes") or key == "budget_bytes":
            yield f"{key.removesuffix('_bytes')} {value / 2**20:.1f} MiB"
        elif key in {"slowdown", "gap", "planning_s", "solver", "prediction_error"}:
            yield f"{key} {value if isinstance(value, str) else f'{value:.3g}'}"
        elif key.startswith("differs") or key == "gradient_error":
            yield f"{key} {value}"
        elif key == "message":
            yield value[-300:]


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    from studies.models import Options  # noqa: PLC0415

    return asdict(Options(tiny=options.tiny, scale=options.scale))


def results_file(options: argparse.Namespace) -> Path:
    return options.results / f"{options.study}.jsonl"


def note(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
