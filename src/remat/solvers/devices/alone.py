"""What solvers for several devices answer when there is one."""

from dataclasses import replace

from remat.core.bounds import required_ops
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.solvers.base import ignore_progress
from remat.solvers.store_all import StoreAll


def answer_for_one_device(
    problem: Problem, limits: Limits, *, is_exact: bool, other: str
) -> Proposal | None:
    """Return everything stored, on a platform of one device; ``None`` if it has more.

    Parameters
    ----------
    problem, limits
        What the solver was asked.
    is_exact
        Whether the solver may claim that this is optimal.
    other
        Name of a solver for one device.

    Raises
    ------
    SolverUnsuitableError
        If not everything fits: that is for solvers of one device. Or if there are more
        and no op is needed.
    """
    if len(problem.platform.devices) > 1:
        if not required_ops(problem.graph):
            msg = (
                f"no op of graph {problem.graph.name!r} is needed, so there is nothing to "
                "place: use solver='store-all', or name what the step hands over"
            )
            raise SolverUnsuitableError(msg)
        return None
    found = StoreAll().solve(problem, limits, ignore_progress)
    if found.schedule is None:
        msg = (
            "the platform has one device, and this solver is for several: use "
            f"solver={other!r}"
        )
        raise SolverUnsuitableError(msg)
    return found if is_exact else replace(found, status=Status.FEASIBLE)
