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
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar, cast

from remat.errors import MissingDependencyError

P = ParamSpec("P")
R = TypeVar("R")

MOST_TOTAL = 2**60
"""Largest sum of sizes or of costs that is handed to the core: a few of them fit in 64
bits."""

MOST_TABLE_BYTES = 2**34
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
    ``inspect.unwrap`` gives the twin, for tests that compare the two.

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

    @functools.wraps(twin)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        module = core()
        if module is None:
            return twin(*args, **kwargs)
        function = getattr(module, twin.__name__, None)
        if function is None:
            msg = (
                f"the native core {module.__file__} has no {twin.__name__!r}: it was built "
                "from other sources than these; reinstall remat (pip install .)"
            )
            raise MissingDependencyError(msg)
        return cast("Callable[P, R]", function)(*args, **kwargs)

    return run
