"""One search over placements: its candidates, judged, and the best of them."""

from dataclasses import dataclass, field, replace

from remat.core.best import Best
from remat.core.bounds import cost_bound_ns
from remat.core.liveness import insert_discards
from remat.core.problem import Limits, Objective, Problem
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.search.device_execution import Execution, ExecutionRule, Executor, Placement
from remat.search.device_instance import DeviceInstance

_RESERVES = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule and how it was made."""

    schedule: Schedule
    trace: Trace
    placement: Placement
    rule: ExecutionRule

    def time_ns(self, objective: Objective) -> int:
        """Return what is to be small."""
        is_serial = objective is Objective.SERIAL
        return self.trace.serial_ns if is_serial else self.trace.overlapped_ns


@dataclass
class DeviceSearchRun:
    """One search: its candidates, and the best of them by each objective.

    ``objective`` and ``limits`` are those of what is under way.
    """

    problem: Problem
    instance: DeviceInstance
    objective: Objective
    limits: Limits
    bests: dict[Objective, Best[Candidate]] = field(
        default_factory=lambda: {
            objective: Best[Candidate]() for objective in Objective
        }
    )
    # What broke the budgets least, to search on from while nothing fits.
    nearest: Candidate | None = None
    bound_ns: int = 0
    tried: int = 0

    def __post_init__(self) -> None:
        self.bound_ns = cost_bound_ns(self.problem)
        self.executor = Executor(self.instance)
        # Of the steps that were judged, so that none are refused twice.
        self.seen: set[int] = set()

    @property
    def best(self) -> Candidate | None:
        """The best candidate by the objective of the moment."""
        return self.bests[self.objective].answer

    @property
    def cost_ns(self) -> int | None:
        """Return what the search makes small, of its best candidate."""
        best = self.best
        return None if best is None else best.time_ns(self.objective)

    def judged(self, schedule: Schedule) -> Trace:
        """Replay a schedule."""
        return simulate(self.problem.graph, self.problem.platform, schedule)

    def offer(self, schedule: Schedule, placement: Placement) -> None:
        """Judge a schedule that was found by other means."""
        self.keep(
            Candidate(schedule, self.judged(schedule), placement, ExecutionRule())
        )

    def keep(self, candidate: Candidate) -> bool:
        """Keep a candidate that fits and is better than the best.

        Returns whether it is by the objective of the moment.
        """
        if candidate.trace.violation is not None:
            excess = self.excess(candidate)
            if excess and (self.nearest is None or excess <= self.excess(self.nearest)):
                self.nearest = candidate
            return False
        for objective, best in self.bests.items():
            best.offer(candidate, candidate.time_ns(objective))
        return self.best is candidate

    @staticmethod
    def excess(candidate: Candidate) -> int:
        """Return the bytes by which a candidate breaks a budget."""
        violation = candidate.trace.violation
        return 0 if violation is None else violation.excess_bytes

    def attempt(self, placement: Placement, rule: ExecutionRule) -> int | None:
        """Execute, and judge what may be the best; return a time it takes at least.

        That is the serial time, or a bound of the overlapped one; ``None`` if it does
        not fit.

        What fits as a list of steps may not fit when copies run ahead of it or behind:
        then the device keeps as much free as was lacking, and again.
        """
        reserve = list(rule.reserve_bytes or (0,) * len(self.instance.devices))
        for _ in range(_RESERVES):
            self.tried += 1
            careful = replace(rule, reserve_bytes=tuple(reserve))
            done = self.executor.execute(placement, careful, limits=self.limits)
            if done is None:
                return None
            is_serial = self.objective is Objective.SERIAL
            cost_ns = done.serial_ns if is_serial else done.soonest_ns
            if self.cost_ns is not None and cost_ns >= self.cost_ns:
                return cost_ns
            if self.is_known(done):
                return None
            schedule = insert_discards(self.problem.graph, done.steps())
            candidate = Candidate(schedule, self.judged(schedule), placement, careful)
            violation = candidate.trace.violation
            if self.keep(candidate) or violation is None:
                return cost_ns
            if violation.device is None or self.limits.is_over:
                return None
            reserve[violation.device] += violation.excess_bytes * 5 // 4
        return None

    def is_known(self, done: Execution) -> bool:
        """Return whether the same steps were judged before, and remember them."""
        key = hash(tuple(done.notes))
        is_known = key in self.seen
        self.seen.add(key)
        return is_known

    @property
    def is_proved(self) -> bool:
        """Whether nothing cheaper exists, up to the precision of the bound."""
        least = self.cost_ns
        return (
            self.objective is Objective.SERIAL
            and least is not None
            and least <= self.bound_ns * (1 + 1e-6)
        )
