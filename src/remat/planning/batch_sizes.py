"""Sizes of a batch: which to try, and what was found of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from remat.core.units import format_bytes, format_ns
from remat.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """One size of the batch, and what a step of it takes.

    Parameters
    ----------
    size
        As :func:`max_batch` gave it to ``make_batch``.
    needed_bytes
        The peak of its plan, or the smallest known budget where that is too much.
    plan
        The plan, ``None`` where none fits.
    """

    size: int
    needed_bytes: int
    plan: Plan | None = field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        """Whether a plan is known that keeps the budget."""
        return self.plan is not None

    def __str__(self) -> str:
        needed = f"{format_bytes(self.needed_bytes):>12}"
        if self.plan is None:
            return f"{self.size:>8}  {needed}  does not fit"
        plain = format_bytes(self.plan.baseline_peak_bytes)
        time = format_ns(round(self.plan.cost_ns / self.size))
        return (
            f"{self.size:>8}  {needed}  {plain:>12}  {self.plan.overhead:>+7.1%}  "
            f"{time:>10}"
        )


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What :func:`max_batch` tried and found.

    Parameters
    ----------
    budget_bytes
        The budget.
    tried
        Every size that was planned, by size; at least one fits.
    """

    budget_bytes: int
    tried: tuple[TriedSize, ...]

    @property
    def largest(self) -> TriedSize:
        """The largest size that fits."""
        return [each for each in self.tried if each.fits][-1]

    @property
    def size(self) -> int:
        """The largest size that fits, as a number."""
        return self.largest.size

    @property
    def plan(self) -> Plan:
        """The plan of the largest size that fits."""
        plans = [each.plan for each in self.tried if each.plan is not None]
        return plans[-1]

    def __str__(self) -> str:
        head = (
            f"{'size':>8}  {'needed':>12}  {'without':>12}  {'time':>7}  {'a unit':>10}"
        )
        return "\n".join(
            [
                f"the largest size within {format_bytes(self.budget_bytes)} is {self.size}",
                head,
                *map(str, self.tried),
            ]
        )


class SizeSearch:
    """Which size to try next: between what fits and what does not.

    Parameters
    ----------
    first
        The smallest size, which fits.
    budget_bytes
        The budget.
    resident_bytes
        What is there during the whole step, at any size.
    most
        The largest size that is of use, if there is one.
    multiple_of
        What sizes after the first are multiples of.
    """

    def __init__(
        self,
        first: TriedSize,
        *,
        budget_bytes: int,
        resident_bytes: int,
        most: int | None,
        multiple_of: int,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.resident_bytes = resident_bytes
        self.most = most
        self.multiple_of = multiple_of
        self.fits = first
        self.exceeds: TriedSize | None = None
        # How many sizes in a row have come out on the same side as the latest.
        self.latest = first
        self.repeats = 1

    def take(self, tried: TriedSize) -> TriedSize:
        """Take note of what a size has come to."""
        before = self.fits if tried.fits else self.exceeds
        self.repeats = self.repeats + 1 if before is self.latest else 1
        self.latest = tried
        if tried.fits:
            self.fits = tried
        else:
            self.exceeds = tried
        return tried

    def sizes(self) -> Iterator[int]:
        """Yield sizes until none is left between what fits and what does not."""
        while (count := self._next()) is not None:
            yield count * self.multiple_of

    def _next(self) -> int | None:
        """Return the next size over what it is a multiple of."""
        low, guess = self.fits.size // self.multiple_of, self._guess()
        if self.exceeds is None:
            guess = max(guess, 2 * low, low + 1)
            most = guess if self.most is None else self.most // self.multiple_of
            return min(guess, most) if low < most else None
        high = self.exceeds.size // self.multiple_of
        if high - low < 2:
            return None
        if self.repeats > 1:
            guess = (low + high) // 2
        return min(max(guess, low + 1), high - 1)

    def _guess(self) -> int:
        """Return what just fits, if bytes grow with the size in a straight line."""
        tried = self.exceeds or self.fits
        needed_bytes = tried.needed_bytes
        if tried.plan is not None:
            needed_bytes = tried.plan.baseline_peak_bytes
        left_bytes = self.budget_bytes - self.resident_bytes
        grown_bytes = max(1, needed_bytes - self.resident_bytes)
        return tried.size * left_bytes // grown_bytes // self.multiple_of
