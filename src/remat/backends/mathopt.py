"""Linear and mixed-integer programs through OR-tools' MathOpt, as plain indices.

A :class:`Model` is a minimisation over variables named by index. :func:`solve` hands it
to HiGHS, SCIP, CP-SAT or Gurobi and returns the incumbent, the proved bound, and why
the solver stopped. Integer variables come back as integers, rounded with a check.

HiGHS cannot be stopped from outside within MathOpt, so all but small models run it in a
process of its own (:mod:`remat.backends.highs_process`): Ctrl-C and a missed
time limit end that process, and the incumbent is what HiGHS wrote to a file. The other
solvers run in a thread and are asked to stop.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from remat.backends.error_stream import HeldErrorStream
from remat.backends.highs_process import Settings as Settings
from remat.backends.highs_process import (
    call_highs,
    hints,
    parameters,
    plain,
    run_highs_apart,
)
from remat.backends.library import check_library
from remat.core.deadline import check_time
from remat.core.errors import MissingDependencyError, SolverFault
from remat.core.problem import StopReason

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2

Answer = TypeVar("Answer")

INTEGRALITY_TOLERANCE = 1e-4
"""How far a value of an integer variable may be from an integer."""

IN_PROCESS_ROWS = 1500
"""HiGHS solves models of up to this many rows in this process, in seconds."""

# The library asks SCIP for a kind of event that SCIP has not, before the search begins.
# The others, which are asked for before it, are all that stopping the search needs.
_SCIP_IS_FINE = ("SCIPcatchEvent does not support", "gscip_event_handler.cc")

_LOOK_S = 0.5
"""Seconds between two looks at whether a solver has ended."""


class MipSolver(StrEnum):
    """The solvers that a model can be handed to."""

    HIGHS = "highs"
    SCIP = "scip"
    CP_SAT = "cp-sat"
    GUROBI = "gurobi"


class Outcome(StrEnum):
    """What a solver has proved about a model."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """Where a search stands: best objective and bound, ``None`` while there is none."""

    elapsed_s: float
    objective: float | None
    bound: float | None

    @property
    def gap(self) -> float | None:
        """(objective - bound) / |objective|, or ``None`` while that is undefined."""
        if self.objective is None or self.bound is None:
            return None
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-12)


IncumbentCallback = Callable[[Incumbent], None]
"""Called, from another thread, whenever the solver's log tells something new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver found.

    Parameters
    ----------
    outcome
        What is proved.
    objective
        Value of the incumbent, or ``None`` without one.
    bound
        Proved lower bound on the objective; minus infinity if nothing is proved.
    values
        Per variable, its value in the incumbent; empty without one.
    is_over_time, is_interrupted
        Whether the time limit, or Ctrl-C, ended the search.
    elapsed_s
        Time it took.
    detail
        The solver's own words where it has something to say.
    """

    outcome: Outcome
    objective: float | None
    bound: float
    values: Sequence[float] = ()
    is_over_time: bool = False
    is_interrupted: bool = False
    elapsed_s: float = 0.0
    detail: str = ""

    @property
    def stop_reason(self) -> StopReason:
        """Why the search ended."""
        if self.is_interrupted:
            return StopReason.INTERRUPTED
        return StopReason.TIME_LIMIT if self.is_over_time else StopReason.COMPLETED

    def integer(self, variable: int) -> int:
        """Return the value of an integer variable, rounded with a check.

        Raises
        ------
        SolverFault
            If the value is further than :data:`INTEGRALITY_TOLERANCE` from an integer.
        """
        value = self.values[variable]
        nearest = round(value)
        if abs(value - nearest) > INTEGRALITY_TOLERANCE:
            msg = (
                f"integer variable {variable} has the value {value!r}, further than "
                f"{INTEGRALITY_TOLERANCE} from an integer"
            )
            raise SolverFault(msg)
        return nearest


NOTHING_IN_TIME = Solution(
    outcome=Outcome.UNKNOWN, objective=None, bound=-math.inf, is_over_time=True
)
"""What is found where time is over before the search begins."""


@dataclass(slots=True)
class Model:
    """A minimisation, built row by row.

    Attributes
    ----------
    lower, upper, is_integer, cost
        Per variable, its bounds, whether it is integer, and its linear cost.
    row_lower, row_upper
        Per row, its bounds.
    entries
        Row, variable and coefficient of every nonzero, row after row.
    quadratic_cost
        Coefficient of each product of two variables in the objective, by the pair with
        the smaller index first.
    start
        Values of a known solution, of all or of some variables.
    """

    lower: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    is_integer: list[bool] = field(default_factory=list[bool])
    cost: list[float] = field(default_factory=list[float])
    row_lower: list[float] = field(default_factory=list[float])
    row_upper: list[float] = field(default_factory=list[float])
    entries: tuple[list[int], list[int], list[float]] = field(
        default_factory=lambda: ([], [], [])
    )
    quadratic_cost: dict[tuple[int, int], float] = field(
        default_factory=dict[tuple[int, int], float]
    )
    start: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def variable_count(self) -> int:
        """Number of variables."""
        return len(self.lower)

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.row_lower)

    def add_variable(
        self,
        lower: float = 0.0,
        upper: float = 1.0,
        *,
        is_integer: bool = False,
        cost: float = 0.0,
    ) -> int:
        """Add a variable and return its index.

        Raises
        ------
        ValueError
            If a number is not a number, or the bounds are crossed.
        """
        check_time()
        if not lower <= upper or not math.isfinite(cost):
            msg = f"variable {len(self.lower)} has bounds {lower}, {upper}, cost {cost}"
            raise ValueError(msg)
        self.lower.append(lower)
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        self.cost.append(cost)
        return len(self.lower) - 1

    def add_binary(self, cost: float = 0.0) -> int:
        """Add a variable that is 0 or 1 and return its index."""
        return self.add_variable(is_integer=True, cost=cost)

    def add_row(
        self,
        terms: Iterable[tuple[int, float]],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> int:
        """Add ``lower <= sum of coefficient x variable <= upper``; return its index.

        Terms of one variable are summed.

        Raises
        ------
        ValueError
            If there is no such variable, a number is not finite, or bounds are crossed.
        """
        check_time()
        row = len(self.row_lower)
        summed: dict[int, float] = {}
        for variable, coefficient in terms:
            if not 0 <= variable < len(self.lower) or not math.isfinite(coefficient):
                msg = (
                    f"row {row} has the term {coefficient} x variable {variable} of "
                    f"{len(self.lower)}"
                )
                raise ValueError(msg)
            summed[variable] = summed.get(variable, 0.0) + coefficient
        if not lower <= upper:
            msg = f"row {row} has bounds {lower}, {upper}"
            raise ValueError(msg)
        rows, columns, coefficients = self.entries
        for variable in sorted(summed):
            rows.append(row)
            columns.append(variable)
            coefficients.append(summed[variable])
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return row

    def add_quadratic_cost(self, first: int, second: int, coefficient: float) -> None:
        """Add ``coefficient x first x second`` to the objective (SCIP, Gurobi only).

        Raises
        ------
        ValueError
            If there is no such variable or the coefficient is not finite.
        """
        count = len(self.lower)
        if not (0 <= first < count and 0 <= second < count):
            msg = f"a product of variables {first} and {second} of {count}"
            raise ValueError(msg)
        if not math.isfinite(coefficient):
            msg = f"the product of variables {first}, {second} costs {coefficient}"
            raise ValueError(msg)
        pair = (min(first, second), max(first, second))
        self.quadratic_cost[pair] = self.quadratic_cost.get(pair, 0.0) + coefficient

    @property
    def is_bounded_below(self) -> bool:
        """Whether the objective cannot fall without end, seen from the bounds alone."""
        if any(coefficient < 0 for coefficient in self.quadratic_cost.values()):
            return all(map(math.isfinite, (*self.lower, *self.upper)))
        return all(
            cost == 0 or math.isfinite(low if cost > 0 else high)
            for cost, low, high in zip(self.cost, self.lower, self.upper, strict=True)
        )

    def violation(self, values: Sequence[float]) -> float:
        """Return how far ``values`` are outside the bounds and rows, at least 0.

        Raises
        ------
        ValueError
            If there is not one value per variable.
        """
        activity = [0.0] * self.row_count
        for row, variable, coefficient in zip(*self.entries, strict=True):
            activity[row] += coefficient * values[variable]
        worst = 0.0
        for found, lower, upper in (
            *zip(values, self.lower, self.upper, strict=True),
            *zip(activity, self.row_lower, self.row_upper, strict=True),
        ):
            worst = max(worst, lower - found, found - upper)
        return worst

    def to_proto(self, *, is_relaxed: bool = False) -> "model_pb2.ModelProto":
        """Return the model as MathOpt's protocol buffer, relaxed if asked.

        Raises
        ------
        MissingDependencyError
            If MathOpt is not installed.
        """
        check_library("ortools.math_opt.model_pb2")
        from ortools.math_opt import model_pb2  # noqa: PLC0415  # keeps imports light

        proto = model_pb2.ModelProto()
        count = self.variable_count
        proto.variables.ids.extend(range(count))
        proto.variables.lower_bounds.extend(self.lower)
        proto.variables.upper_bounds.extend(self.upper)
        proto.variables.integers.extend(
            [False] * count if is_relaxed else self.is_integer
        )
        priced = [index for index in range(count) if self.cost[index]]
        objective = proto.objective
        objective.linear_coefficients.ids.extend(priced)
        objective.linear_coefficients.values.extend(self.cost[i] for i in priced)
        pairs = sorted(self.quadratic_cost)
        quadratic = objective.quadratic_coefficients
        quadratic.row_ids.extend(first for first, _ in pairs)
        quadratic.column_ids.extend(second for _, second in pairs)
        quadratic.coefficients.extend(self.quadratic_cost[pair] for pair in pairs)
        proto.linear_constraints.ids.extend(range(self.row_count))
        proto.linear_constraints.lower_bounds.extend(self.row_lower)
        proto.linear_constraints.upper_bounds.extend(self.row_upper)
        rows, columns, coefficients = self.entries
        proto.linear_constraint_matrix.row_ids.extend(rows)
        proto.linear_constraint_matrix.column_ids.extend(columns)
        proto.linear_constraint_matrix.coefficients.extend(coefficients)
        return proto


def solve(
    model: Model,
    solver: MipSolver = MipSolver.HIGHS,
    settings: Settings | None = None,
    *,
    is_relaxed: bool = False,
    on_incumbent: IncumbentCallback | None = None,
) -> Solution:
    """Minimise a model; Ctrl-C ends the search and keeps the incumbent.

    Parameters
    ----------
    model
        What to minimise; its ``start`` is handed on as a hint.
    solver, settings
        Which solver, and when it stops.
    is_relaxed
        Whether to solve the relaxation, in which no variable need be integer.
    on_incumbent
        Told of progress.

    Returns
    -------
    Solution
        Incumbent, bound, and what is proved.

    Raises
    ------
    MissingDependencyError
        If the solver's library, or its licence, is not there.
    SolverFault
        If the solver fails in a way that leaves nothing to use.
    ValueError
        If the model is unbounded, or the solver takes no quadratic objective.

    Notes
    -----
    Optimality is up to the solvers' tolerances: 1e-6 per row, and integer values within
    1e-5 or so. Scale models such that this is harmless, and judge the answer.
    """
    if model.quadratic_cost and solver in {MipSolver.HIGHS, MipSolver.CP_SAT}:
        msg = (
            f"{solver} takes no products of variables in the objective; "
            f"{MipSolver.SCIP} and {MipSolver.GUROBI} do"
        )
        raise ValueError(msg)
    log = _Log(solver, on_incumbent)
    started = time.monotonic()
    settings = settings or Settings()
    if settings.is_over:
        return NOTHING_IN_TIME
    proto = model.to_proto(is_relaxed=is_relaxed)
    settings = settings.after(time.monotonic() - started)
    if settings.is_over:
        return NOTHING_IN_TIME
    if solver is MipSolver.HIGHS and model.row_count > IN_PROCESS_ROWS:
        found = _solve_apart(model, proto, settings, log)
    else:
        found = _solve_in_thread(model, proto, solver, settings, log)
    return _checked(model, found, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Raw:
    """What comes back from MathOpt, as plain values."""

    reason: str
    limit: str = ""
    detail: str = ""
    objective: float | None = None
    bound: float = -math.inf
    values: Sequence[float] = ()
    is_interrupted: bool = False


# --- progress from logs --------------------------------------------------------------

_NUMBER = r"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|inf)"
_HIGHS_LINE = re.compile(
    rf"^\s*[A-Za-z]?\s+\d\S*\s+\d\S*\s+\d\S*\s+[\d.]+%\s+({_NUMBER})\s+({_NUMBER})\s"
)
_CP_SAT_LINE = re.compile(rf"best:({_NUMBER})\s+next:\[({_NUMBER}),")


class _Log:
    """Reads incumbents and bounds out of a solver's log."""

    def __init__(self, solver: MipSolver, report: IncumbentCallback | None) -> None:
        self.solver = solver
        self.report = report
        self.started = time.monotonic()
        self.objective: float | None = None
        self.bound: float | None = None

    def take(self, lines: Iterable[str]) -> None:
        """Note what lines of the log say, and report it if it is new."""
        before = (self.objective, self.bound)
        for line in lines:
            self._read(line)
        if self.report is not None and (self.objective, self.bound) != before:
            self.report(
                Incumbent(
                    elapsed_s=time.monotonic() - self.started,
                    objective=self.objective,
                    bound=self.bound,
                )
            )

    def _read(self, line: str) -> None:
        match self.solver:
            case MipSolver.HIGHS:
                if found := _HIGHS_LINE.match(line):
                    self._note(found[1], found[2])
            case MipSolver.SCIP:
                fields = [part.strip() for part in line.split("|")]
                if len(fields) > 4 and re.fullmatch(_NUMBER, fields[-4]):
                    self._note(fields[-4], fields[-3])
            case MipSolver.CP_SAT:
                if found := _CP_SAT_LINE.search(line):
                    self._note(found[2], found[1])
            case MipSolver.GUROBI:
                # "Node Node | Obj Depth IntInf | Incumbent BestBd Gap | It/Node Time"
                found = re.search(rf"({_NUMBER}|-)\s+({_NUMBER})\s+[\d.]+%", line)
                if found:
                    self._note(found[2], found[1])

    def _note(self, bound: str, objective: str) -> None:
        for name, text in (("bound", bound), ("objective", objective)):
            if re.fullmatch(_NUMBER, text) and math.isfinite(value := float(text)):
                setattr(self, name, value)


# --- in this process -----------------------------------------------------------------


def _solve_in_thread(
    model: Model,
    proto: "model_pb2.ModelProto",
    solver: MipSolver,
    settings: Settings,
    log: _Log,
) -> _Raw:
    """Solve in a thread, so that Ctrl-C reaches this one, which asks it to stop."""
    from ortools.util.python import solve_interrupter  # noqa: PLC0415

    interrupter = solve_interrupter.SolveInterrupter()
    answer, is_interrupted = run_until_interrupted(
        lambda: _call_mathopt(proto, solver, settings, model.start, log, interrupter),
        interrupter.interrupt,
        name=f"remat {solver}",
    )
    return replace(answer, is_interrupted=is_interrupted)


def run_until_interrupted(
    work: Callable[[], Answer], stop: Callable[[], None], *, name: str
) -> tuple[Answer, bool]:
    """Work in a thread; return its answer, and whether Ctrl-C ended it.

    Parameters
    ----------
    work
        What it raises is raised here.
    stop
        Called on Ctrl-C, which reaches this thread: asks ``work`` to end.
    name
        Of the thread.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            answers.append(work())
        except Exception as error:  # noqa: BLE001 - raised again by the other thread
            errors.append(error)
        finally:
            is_done.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    is_interrupted = False
    # Not join: in Python 3.11 an interrupted one takes the thread for ended.
    while not is_done.is_set():
        try:
            is_done.wait(_LOOK_S)
        except KeyboardInterrupt:
            is_interrupted = True
            stop()
    if errors:
        raise errors[0]
    return answers[0], is_interrupted


def _call_mathopt(
    proto: "model_pb2.ModelProto",
    solver: MipSolver,
    settings: Settings,
    start: Mapping[int, float],
    log: _Log,
    interrupter: Any,
) -> _Raw:
    from ortools.math_opt.python import mathopt  # noqa: PLC0415

    if solver is MipSolver.HIGHS:
        # HiGHS asks nobody whether to go on, so there is no interrupter to pass.
        answer = call_highs(proto, settings, start=start, take_lines=log.take)
        return _Raw(**answer)
    kinds = {
        MipSolver.SCIP: mathopt.SolverType.GSCIP,
        MipSolver.CP_SAT: mathopt.SolverType.CP_SAT,
        MipSolver.GUROBI: mathopt.SolverType.GUROBI,
    }
    options = parameters(settings)
    options.threads = settings.threads
    try:
        opened = mathopt.Model.from_model_proto(proto)
        harmless = _SCIP_IS_FINE if solver is MipSolver.SCIP else ()
        with HeldErrorStream(*harmless) as held:

            def take(lines: Iterable[str]) -> None:
                held.release()
                log.take(lines)

            result = mathopt.solve(
                opened,
                kinds[solver],
                params=options,
                model_params=hints(opened, start),
                msg_cb=take,
                interrupter=interrupter,
            )
    except RuntimeError as error:
        if solver is MipSolver.GUROBI:
            msg = (
                f"Gurobi cannot be used here ({error}): install its library, with a "
                "licence, or choose one of the solvers that come with OR-tools: "
                f"{MipSolver.HIGHS}, {MipSolver.SCIP}, {MipSolver.CP_SAT}"
            )
            raise MissingDependencyError(msg) from error
        raise
    return _Raw(**plain(result, len(proto.variables.ids)))


# --- apart ---------------------------------------------------------------------------


def _solve_apart(
    model: Model, proto: "model_pb2.ModelProto", settings: Settings, log: _Log
) -> _Raw:
    answer = run_highs_apart(proto, settings, start=model.start, take_lines=log.take)
    if answer["reason"] in {"killed", "interrupted"}:
        # The process is gone; the log is what remains of its bound.
        values: Sequence[float] = answer["values"]
        objective = None
        if values:
            objective = sum(
                cost * value for cost, value in zip(model.cost, values, strict=True)
            )
        return _Raw(
            reason="feasible" if values else "no_solution_found",
            limit="interrupted" if answer["reason"] == "interrupted" else "time",
            objective=objective,
            bound=-math.inf if log.bound is None else log.bound,
            values=values,
            is_interrupted=answer["reason"] == "interrupted",
        )
    return _Raw(**answer)


# --- what comes back -----------------------------------------------------------------


def _checked(model: Model, raw: _Raw, elapsed_s: float) -> Solution:
    outcomes = {
        "optimal": Outcome.OPTIMAL,
        "feasible": Outcome.FEASIBLE,
        "infeasible": Outcome.INFEASIBLE,
        "no_solution_found": Outcome.UNKNOWN,
        # Numerical trouble: what was found is judged by others, what is proved is lost.
        "imprecise": Outcome.FEASIBLE if len(raw.values) else Outcome.UNKNOWN,
        "numerical_error": Outcome.FEASIBLE if len(raw.values) else Outcome.UNKNOWN,
    }
    if raw.reason == "infeasible_or_unbounded" and model.is_bounded_below:
        outcome = Outcome.INFEASIBLE
    elif raw.reason in outcomes:
        outcome = outcomes[raw.reason]
    elif raw.reason in {"unbounded", "infeasible_or_unbounded"}:
        msg = f"the model is unbounded: {raw.detail or raw.reason}"
        raise ValueError(msg)
    else:
        msg = f"the solver ended with {raw.reason}: {raw.detail or 'no reason given'}"
        raise SolverFault(msg)
    is_proof_lost = raw.reason in {"imprecise", "numerical_error"}
    return Solution(
        outcome=outcome,
        objective=raw.objective if len(raw.values) else None,
        bound=-math.inf if is_proof_lost else raw.bound,
        values=raw.values,
        is_over_time=raw.limit == "time",
        is_interrupted=raw.is_interrupted,
        elapsed_s=elapsed_s,
        detail=raw.detail,
    )
