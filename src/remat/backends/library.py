"""Say which library a solver lacks."""

from importlib import import_module

from remat.core.errors import MissingDependencyError


def check_library(module: str) -> None:
    """Check that a module of OR-tools can be imported.

    Parameters
    ----------
    module
        Its full name, such as ``"ortools.sat.python.cp_model"``.

    Raises
    ------
    MissingDependencyError
        If it cannot; the message says how to get it, and which solvers do without.
    """
    try:
        import_module(module)
    except ImportError as error:
        msg = (
            f"this solver needs the library OR-tools, whose module {module} cannot be "
            f"imported ({error}); install it with: pip install 'ortools>=9.12'; on one "
            "device greedy-eviction and rotor do without it, on several pofo"
        )
        raise MissingDependencyError(msg) from error
