"""Solvers, one file a method, and the explicit table of them."""

from remat.solvers.base import Solver as Solver
from remat.solvers.store_all import StoreAll as StoreAll

SOLVERS: dict[str, type[Solver]] = {
    "store-all": StoreAll,
}
"""Name on the command line and in ``solver=`` -> solver class."""
