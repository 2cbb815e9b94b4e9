"""``remat check``: whether what a plan file says is so, without asking any solver."""

import argparse

from remat.cli.base import Command, ExitCode, add_output, print_json, warn
from remat.core.errors import CertificateError, PlanMismatchError
from remat.core.units import format_bytes, format_ns
from remat.planning.plan import Plan, load_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat check``."""
    parser.add_argument("file", metavar="FILE", help="a plan file")
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Replay the schedule, verify the certificate, and say what follows."""
    try:
        # Loading does both, and refuses what is not as the file says.
        plan = load_plan(options.file)
    except (PlanMismatchError, CertificateError) as error:
        warn(str(error))
        if options.json:
            print_json({"kind": "check", "is_valid": False, "message": str(error)})
        return ExitCode.BROKEN_PROMISE
    if options.json:
        print_json({"kind": "check", "is_valid": True, **_figures(plan)})
    else:
        print("\n".join(_lines(plan)))
    return ExitCode.OK


def _figures(plan: Plan) -> dict[str, object]:
    certificate = plan.certificate
    return {
        "peak_bytes": list(plan.trace.peak_bytes),
        "budget_bytes": [device.budget_bytes for device in plan.platform.devices],
        "cost_ns": plan.cost_ns,
        "floor_ns": plan.floor_ns,
        "proved_ns": plan.proved_ns,
        "gap": plan.gap,
        "moments": [] if certificate is None else list(certificate.moments),
        "multipliers": 0 if certificate is None else len(certificate.multipliers),
    }


def _lines(plan: Plan) -> list[str]:
    peaks = [
        f"{format_bytes(peak)} of "
        + ("any" if budget is None else format_bytes(budget))
        + (f" on {device.name}" if plan.has_several_devices else "")
        for device, peak, budget in zip(
            plan.platform.devices,
            plan.trace.peak_bytes,
            (device.budget_bytes for device in plan.platform.devices),
            strict=True,
        )
    ]
    certificate = plan.certificate
    if certificate is None:
        proof = "every op runs once at least"
    else:
        proof = (
            f"{len(certificate.moments)} moments and {len(certificate.multipliers)} "
            "multipliers, in integers"
        )
    return [
        f"plan for {plan.graph.name}",
        f"  schedule      valid: {len(plan.schedule.steps)} steps replayed",
        f"  peak          {', '.join(peaks)}",
        f"  time          {format_ns(plan.cost_ns)}",
        f"  proved bound  {format_ns(plan.floor_ns)} for every schedule ({proof})",
        f"  so            {plan.distance}",
    ]


CHECK = Command(
    name="check",
    summary="check what a plan file says: its schedule, and its proved bound",
    description=(
        "Check a plan file against its own graph: replay the schedule step by step, and "
        "verify the certificate of the proved bound in exact integer arithmetic. No "
        "solver is asked or trusted. Exit code 4 says that the file claims more than is "
        "true. Needs no torch."
    ),
    examples=("remat check plan.json", "remat check plan.json --json"),
    add_arguments=add_arguments,
    run=run,
)
