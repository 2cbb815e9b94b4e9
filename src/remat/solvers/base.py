"""The contract of a solver."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from remat.core.deadline import TimeIsUpError, in_time
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def ignore_progress(activity: str, share: float) -> None:
    """Drop a progress report."""


class Solver(Protocol):
    """Finds a schedule for a problem.

    A solver is a frozen dataclass whose fields are its parameters: for one of another
    type, or out of range, it raises a ``ValueError`` that names it. It never raises for
    a budget that is too small (it answers INFEASIBLE or UNKNOWN), never changes its
    input, prints nothing, and reads the clock only to respect its limits. What it
    returns is judged by :func:`remat.planning.portfolio.solve`; it need not be trusted.

    Attributes
    ----------
    schedule_class
        In words: the schedules among which ``OPTIMAL`` claims optimality.
    is_exact
        Whether the solver may answer OPTIMAL or INFEASIBLE.
    """

    schedule_class: ClassVar[str]
    is_exact: ClassVar[bool]

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return a proposal for ``problem``.

        Raises
        ------
        SolverUnsuitableError
            If the solver cannot treat this kind of graph or platform at all.
        """
        ...


def solve_in_time(
    solver: Solver,
    problem: Problem,
    limits: Limits,
    on_progress: ProgressCallback = ignore_progress,
) -> Proposal:
    """Return what a solver proposes, and UNKNOWN if its time is over before its search.

    A solver whose time is over in the middle of its search answers with the best so
    far; until then :func:`remat.core.deadline.check_time` ends what it builds.

    Raises
    ------
    SolverUnsuitableError
        If the solver cannot treat this kind of graph or platform at all.
    """
    try:
        with in_time(limits.deadline_s):
            return solver.solve(problem, limits, on_progress)
    except TimeIsUpError:
        return Proposal(
            status=Status.UNKNOWN,
            stop_reason=StopReason.TIME_LIMIT,
            message=(
                f"the time limit is too short to prepare the search on "
                f"{len(problem.graph.ops):_} ops"
            ),
        )


def single_device_kind_index(problem: Problem) -> int:
    """Return the position of device 0's kind in the ops' costs.

    For solvers that use device 0 alone.

    Raises
    ------
    SolverUnsuitableError
        If a storage has its home on another device, or an op cannot run on device 0.
    """
    graph, device = problem.graph, problem.platform.devices[0]
    kind_index = graph.kind_index(device.kind)
    for index, storage in enumerate(graph.storages):
        if storage.home != 0:
            msg = (
                f"storage {index} {storage.name!r} has home device {storage.home}; this "
                "solver uses device 0 alone"
            )
            raise SolverUnsuitableError(msg)
    for index, op in enumerate(graph.ops):
        if op.cost_ns[kind_index] is None:
            msg = (
                f"op {index} {op.name!r} cannot run on a device of kind "
                f"{device.kind!r}; this solver uses device 0 alone"
            )
            raise SolverUnsuitableError(msg)
    return kind_index
