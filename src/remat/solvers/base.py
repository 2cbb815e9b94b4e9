"""The contract of a solver."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from remat.problem import Limits, Problem, Proposal

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def ignore_progress(activity: str, share: float) -> None:
    """Drop a progress report."""


class Solver(Protocol):
    """Finds a schedule for a problem.

    A solver is a frozen dataclass whose fields are its parameters. It never raises for
    a budget that is too small (it answers INFEASIBLE or UNKNOWN), never changes its
    input, prints nothing, and reads the clock only to respect its limits. What it
    returns is judged by :func:`remat.planning.solve`; it need not be trusted.

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
