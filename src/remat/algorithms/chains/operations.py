"""The operations of chains and joins, in the order in which they run.

A plan says what runs and in which order. When a value is discarded follows from it: at
its last use (:mod:`remat.core.liveness`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage forward.

    Parameters
    ----------
    stage, branch
        Indices of the stage and of its branch; a chain is branch 0.
    option
        ``None`` when only the output is wanted; otherwise the index of the option that
        says what the stage saves inside for its backward.
    """

    stage: int
    branch: int = 0
    option: int | None = None


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage backward.

    Parameters
    ----------
    stage, branch
        Indices of the stage and of its branch; a chain is branch 0.
    option
        Index of the option whose savings it starts from; ``None`` where there is one.
    """

    stage: int
    branch: int = 0
    option: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn the last values of all branches into their gradients (the loss)."""


@dataclass(frozen=True, slots=True)
class Store:
    """Copy the input of a stage from the device to a storage level.

    Parameters
    ----------
    stage
        Index of the stage.
    level
        Index of the level; 0 is the device's own.
    """

    stage: int
    level: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the input of a stage from a storage level to the device.

    Parameters
    ----------
    stage
        Index of the stage.
    level
        Index of the level; 0 is the device's own.
    """

    stage: int
    level: int = 1


UnitOperation = Forward | Backward | Turn
Operation = Forward | Backward | Turn | Store | Load
