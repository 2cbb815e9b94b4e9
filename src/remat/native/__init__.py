"""The native core, and the choice between it and the Python twins.

Hot loops of the planning algorithms exist twice: as a function of the extension module
``remat.native._core`` (C++20, built with the package), and as a plain Python *twin* of
the same name, arguments and answers, which tests compare it with. Where the package was
installed without a C++ compiler there is no extension module: the twins do the work,
more slowly, and a :class:`NativeCoreMissingWarning` says so once.

Environment
-----------
REMAT_NATIVE
    ``0`` runs the Python twins even where the native core is installed. A path is that
    of an extension module to load instead of the installed one, such as a build with
    sanitizers.
"""

import functools
import importlib.util
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from remat.core.checks import integer_of, require, shown
from remat.core.errors import MissingDependencyError

P = ParamSpec("P")
R = TypeVar("R")

MOST_TOTAL = 2**60
"""Largest sum of sizes or of costs that is handed to the core: a few of them fit in 64
bits."""

MOST_TABLE_BYTES = 2**33
"""Largest tables that the core makes."""

LARGEST_EXPONENT = 8.0
"""Largest exponent of a score: with it no number that the core counts is infinite."""

_CORE = "remat.native._core"


class NativeCoreMissingWarning(RuntimeWarning):
    """The package was installed without its native core; planning takes longer."""


@functools.cache
def core() -> ModuleType | None:
    """Return the extension module, or ``None`` if it is absent or switched off.

    Raises
    ------
    MissingDependencyError
        If ``REMAT_NATIVE`` names a file that is not there.
    """
    choice = os.environ.get("REMAT_NATIVE", "")
    if choice == "0":
        return None
    if choice:
        return _load(Path(choice))
    if importlib.util.find_spec(_CORE) is None:
        warnings.warn(
            "remat was installed without its native core (no C++ compiler was found); "
            "planning takes longer. Install a compiler and reinstall remat, or set "
            "REMAT_NATIVE=0 to silence this",
            NativeCoreMissingWarning,
            stacklevel=3,
        )
        return None
    return import_module(_CORE)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_CORE, path)
    if spec is None or spec.loader is None or not path.is_file():
        msg = (
            f"REMAT_NATIVE names {str(path)!r}, which is not an extension module; give "
            "the path of a built _core module, 0 for the Python twins, or unset it"
        )
        raise MissingDependencyError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_CORE] = module
    spec.loader.exec_module(module)
    return module


def native(twin: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs the native function of the twin's name.

    Use as a decorator of the Python twin. Without a native core the twin itself runs.
    ``inspect.unwrap`` gives the twin, for tests that compare the two. Both refuse the
    same: arguments of another type than the annotations say, and integers of more than
    64 bits, are a ``TypeError``; numbers that make no sense a ``ValueError``, which
    function and twin look for themselves.

    Parameters
    ----------
    twin
        A function whose name, arguments and answers are those of a function of
        ``remat.native._core``.

    Raises
    ------
    MissingDependencyError
        When called, if the native core was built from other sources.
    """
    checked = _with_types(twin)

    @functools.wraps(twin)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        module = core()
        if module is None:
            return checked(*args, **kwargs)
        function = getattr(module, twin.__name__, None)
        if function is None:
            msg = (
                f"the native core {module.__file__} has no {twin.__name__!r}: it was built "
                "from other sources than these; reinstall remat (pip install .)"
            )
            raise MissingDependencyError(msg)
        return cast("Callable[P, R]", function)(*args, **kwargs)

    run.__wrapped__ = checked
    return run


def check_table(numbers: int) -> None:
    """Refuse tables of more than :data:`MOST_TABLE_BYTES`, in 8-byte numbers.

    Raises
    ------
    ValueError
        If they would be larger.
    """
    require(
        8 * numbers <= MOST_TABLE_BYTES, "the tables would take more than 2**33 bytes"
    )


def check_counts(*lists: Iterable[int]) -> int:
    """Return the sum of numbers, none of which is negative, at most :data:`MOST_TOTAL`.

    Raises
    ------
    ValueError
        If one is negative, or the sum larger.
    """
    total = 0
    for numbers in lists:
        for number in numbers:
            require(number >= 0, "a number is negative")
            total += number
    require(total <= MOST_TOTAL, "numbers add up to more than 2**60")
    return total


def check_indices(
    indices: Iterable[int], count: int, what: str, first: int = 0
) -> None:
    """Refuse indices that are not from ``first`` to the last of ``count`` things.

    Raises
    ------
    ValueError
        If there is one.
    """
    for index in indices:
        require(first <= index < count, f"there is no such {what}: {index}")


def check_rule(exponents: Iterable[float], shares: Iterable[float]) -> None:
    """Refuse exponents that are not 0 to 8, and shares that are not 0 to 1.

    Raises
    ------
    ValueError
        If there is one.
    """
    for exponent in exponents:
        require(0.0 <= exponent <= LARGEST_EXPONENT, "an exponent is not 0 to 8")
    for share in shares:
        require(0.0 <= share <= 1.0, "a share is not 0 to 1")


def check_time(time_limit_s: float | None) -> None:
    """Refuse a time limit that is not a number.

    Raises
    ------
    ValueError
        If it is none.
    """
    is_number = time_limit_s is None or not math.isnan(time_limit_s)
    require(is_number, "the time limit is not a number")


def _with_types(twin: Callable[P, R]) -> Callable[P, R]:
    """Return the twin, refusing what the native function's binding refuses."""
    signature = inspect.signature(twin)
    hints: dict[str, Any] = {}

    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hints:
            hints.update(get_type_hints(twin))
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints and not _fits(value, hints[name]):
                needed = signature.parameters[name].annotation
                msg = (
                    f"{twin.__name__}(): {name} is {shown(value)}; it must be {needed}"
                )
                raise TypeError(msg)
        return twin(*args, **kwargs)

    functools.update_wrapper(checked, twin)
    # What compares twins with the core unwraps up to here.
    del vars(checked)["__wrapped__"]
    vars(checked)["__signature__"] = signature
    return checked


def _fits(value: Any, hint: Any) -> bool:
    """Whether the binding would take a value where the twin has this annotation."""
    if hint is int:
        number = int(value) if isinstance(value, bool) else integer_of(value)
        return number is not None and -(2**63) <= number < 2**63
    if hint in {bool, NoneType}:
        return isinstance(value, hint)
    if hint is float:
        return isinstance(value, int | float | np.bool_ | np.integer | np.floating)
    origin, inside = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, choice) for choice in inside)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        return False
    entries: Sequence[Any] = cast("Sequence[Any]", value)
    if origin is Sequence:
        return all(_fits(entry, inside[0]) for entry in entries)
    # A tuple, or one whose entries have names.
    inside = inside or tuple(get_type_hints(hint).values())
    return len(entries) == len(inside) and all(map(_fits, entries, inside))
