"""Rows for the time when devices and links work together: every queue in order.

A run ends no earlier than its device's queue and its inputs allow, plus its cost; a
copy no earlier than its link's queue and its source. All ends are at most the horizon,
so ``- horizon x (1 - chosen)`` switches a row off. Only ends that matter are tight.
"""

from collections.abc import Iterable, Sequence

from remat.solvers.devices.rows import ONE, ZERO, Program, Sum, term


class ClockRows:
    """Writes the rows of a program, slot by slot.

    Parameters
    ----------
    program
        Where the rows go.
    horizon
        A time by which a best schedule has ended.
    device_count
        Number of devices.
    copies_wait
        Whether a copy waits for what was issued before it on its devices.
    """

    def __init__(
        self, program: Program, horizon: float, device_count: int, *, copies_wait: bool
    ) -> None:
        self.program = program
        self.horizon = horizon
        self.copies_wait = copies_wait
        self.device_free = [ZERO] * device_count
        self.link_free: dict[tuple[int, int], Sum] = {}
        self.ready: dict[tuple[int, int], Sum] = {}

    def run(
        self,
        device: int,
        chosen: Sum,
        cost: float,
        reads: Iterable[int],
        writes: Iterable[int],
    ) -> None:
        """Write the rows of a possible run."""
        end = self._moment()
        free = self.device_free[device]
        self.program.at_least(end, free.plus(chosen, times=cost))
        for storage in reads:
            self._if(chosen, end, self.ready.get((storage, device), ZERO), cost)
        self.device_free[device] = end
        for storage in writes:
            self._arrives(storage, device, chosen, end)

    def copy(
        self, storage: int, link: tuple[int, int], chosen: Sum, time: float
    ) -> None:
        """Write the rows of a possible copy."""
        source, target = link
        end = self._moment()
        free = self.link_free.get(link, ZERO)
        self.program.at_least(end, free.plus(chosen, times=time))
        self._if(chosen, end, self.ready.get((storage, source), ZERO), time)
        for device in link if self.copies_wait else ():
            self._if(chosen, end, self.device_free[device], time)
        self.link_free[link] = end
        self._arrives(storage, target, chosen, end)

    def boundary(
        self, outputs: Sequence[tuple[int, int]], tangents: Sequence[tuple[int, int]]
    ) -> None:
        """Write the rows of the boundary, from storages and their homes."""
        now = self._moment()
        for free in self.device_free:
            self.program.at_least(now, free)
        for place in outputs:
            self.program.at_least(now, self.ready.get(place, ZERO))
        for place in tangents:
            self.ready[place] = now

    def finish(self, weight: float) -> None:
        """Make the end of the last step cost ``weight`` per unit of time."""
        end = term(self.program.model.add_variable(upper=self.horizon, cost=weight))
        for free in (*self.device_free, *self.link_free.values()):
            self.program.at_least(end, free)

    def _moment(self) -> Sum:
        return term(self.program.model.add_variable(upper=self.horizon))

    def _if(self, chosen: Sum, end: Sum, start: Sum, duration: float) -> None:
        """Write ``end >= start + duration`` where ``chosen`` is 1."""
        if start == ZERO:
            return
        slack = ONE.minus(chosen)
        lowest = start.plus(Sum(duration)).plus(slack, times=-self.horizon - duration)
        self.program.at_least(end, lowest)

    def _arrives(self, storage: int, device: int, chosen: Sum, end: Sum) -> None:
        before = self.ready.get((storage, device), ZERO)
        after = self._moment()
        self.program.at_least(after, before)
        self._if(chosen, after, end, 0.0)
        self.ready[storage, device] = after
