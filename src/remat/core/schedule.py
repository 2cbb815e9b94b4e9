"""Schedules: a training step as a list of steps from a closed vocabulary."""

from collections import Counter
from dataclasses import dataclass, fields

from remat.core.checks import checked_integer, keep_records


@dataclass(frozen=True, slots=True)
class Compute:
    """Run op ``op`` on device ``device``; read as "compute op 3 on device 0"."""

    op: int
    device: int = 0


@dataclass(frozen=True, slots=True)
class Discard:
    """Free the bytes of storage ``storage`` on device ``device``."""

    storage: int
    device: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Make storage ``storage``, live on ``source``, live on ``target`` as well."""

    storage: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Pass from forward to backward: forward outputs are live, tangents appear."""


Step = Compute | Discard | Copy | Boundary

_NUMBERS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (Compute, Discard, Copy, Boundary)
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """An ordered list of steps; :mod:`remat.core.simulator` says what it means.

    It need not be valid: numbers of ops, storages and devices may be any integers.

    Raises
    ------
    ValueError
        If the steps are no list, an entry is no step, or a number no integer.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        keep_records(self, tuple(_NUMBERS), "steps", of="a schedule")
        for index, step in enumerate(self.steps):
            for name in _NUMBERS[type(step)]:
                # Asked first, as a schedule may have very many steps.
                if type(number := getattr(step, name)) is not int:
                    checked_integer(f"{name} of step {index} of a schedule", number)

    def __repr__(self) -> str:
        runs = self.computes
        return (
            f"<Schedule: {len(self.steps)} steps, {len(runs)} runs of "
            f"{len(set(runs))} ops>"
        )

    @property
    def computes(self) -> tuple[int, ...]:
        """Op indices in the order in which they are computed."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))

    def recompute_counts(self) -> dict[int, int]:
        """Return, per op that runs more than once, how many extra times it runs."""
        return {op: n - 1 for op, n in Counter(self.computes).items() if n > 1}
