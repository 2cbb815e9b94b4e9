"""The operations of chains and joins, in the order in which they run.

A plan says what runs and in which order. When a value is discarded follows from it: at
its last use (:mod:`remat.core.liveness`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run stage ``stage`` of branch ``branch`` forward.

    ``option`` is ``None`` when only the output is wanted; otherwise it is the index of
    the option that says what the stage saves inside for its backward.
    """

    stage: int
    branch: int = 0
    option: int | None = None


@dataclass(frozen=True, slots=True)
class Backward:
    """Run stage ``stage`` of branch ``branch`` backward, from what ``option`` saved."""

    stage: int
    branch: int = 0
    option: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn the last values of all branches into their gradients (the loss)."""


@dataclass(frozen=True, slots=True)
class Store:
    """Copy the input of stage ``stage`` from the device to storage level ``level``."""

    stage: int
    level: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the input of stage ``stage`` from storage level ``level`` to the device."""

    stage: int
    level: int = 1


UnitOperation = Forward | Backward | Turn
Operation = Forward | Backward | Turn | Store | Load
