"""The table of all solvers, and which of them ``solver="auto"`` runs, and when."""

from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Objective
from remat.solvers.base import Solver
from remat.solvers.checkmate import Checkmate, CheckmateLpRounding
from remat.solvers.chen import ChenGreedy, ChenLowerSets, ChenSqrt
from remat.solvers.device_search import DeviceSearch
from remat.solvers.greedy_eviction import CANDIDATES, GreedyEviction
from remat.solvers.join import Join
from remat.solvers.local_search import LocalSearch
from remat.solvers.lower_sets import LowerSets, LowerSetsApprox
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.moccasin import Moccasin
from remat.solvers.pofo import PoFo
from remat.solvers.rockmate import Rockmate
from remat.solvers.rotor import Revolve, Rotor
from remat.solvers.store_all import StoreAll
from remat.solvers.xengine import XEngine, XEnginePublished

SOLVERS: dict[str, type[Solver]] = {
    "store-all": StoreAll,
    "chen-sqrt": ChenSqrt,
    "chen-greedy": ChenGreedy,
    "chen-lower-sets": ChenLowerSets,
    "greedy-eviction": GreedyEviction,
    "min-cut-retention": MinCutRetention,
    "local-search": LocalSearch,
    "lower-sets": LowerSets,
    "lower-sets-approx": LowerSetsApprox,
    "rotor": Rotor,
    "rockmate": Rockmate,
    "revolve": Revolve,
    "checkmate": Checkmate,
    "checkmate-lp-rounding": CheckmateLpRounding,
    "moccasin": Moccasin,
    "join": Join,
    "pofo": PoFo,
    "device-search": DeviceSearch,
    "xengine": XEngine,
    "xengine-published": XEnginePublished,
}
"""Name on the command line and in ``solver=`` -> solver class."""


def solver_name(solver: Solver) -> str:
    """Return what a solver is called in ``solver=``; its class if it is not there.

    Examples
    --------
    >>> solver_name(LowerSets())
    'lower-sets'
    """
    names = {make: name for name, make in SOLVERS.items()}
    return names.get(type(solver), type(solver).__name__)


AUTO: tuple[type[Solver], ...] = (
    StoreAll,
    ChenSqrt,
    LowerSets,
    Rotor,
    Revolve,
    Join,
    MinCutRetention,
    GreedyEviction,
)
"""What ``solver="auto"`` runs, in this order, until the bound on every cost is met."""

SMALL_OPS = 16
"""Up to how many ops :class:`~remat.solvers.checkmate.Checkmate` comes last, which is
exact, and takes 1 to 150 ms for so many."""

QUICK: tuple[tuple[Solver, float], ...] = (
    (StoreAll(), 1.0),
    (ChenSqrt(), 1.0),
    (GreedyEviction(candidates=CANDIDATES[1:2], starts_from_segments=False), 0.9),
    (Revolve(), 0.4),
    (GreedyEviction(candidates=CANDIDATES[2:3], starts_from_segments=False), 0.5),
    (GreedyEviction(candidates=(*CANDIDATES[:1], *CANDIDATES[3:])), 0.6),
)
"""What it runs first where time is limited, and how much of the time that is left each
may take. The time of these solvers is about linear in the graph: for 10 000 ops, half
a second until there is a schedule of a chain, and one second for any other."""

AUTO_IN_TIME: tuple[type[Solver], ...] = (Rotor, Join, MinCutRetention, LowerSets)
"""What it runs after these, each with an equal part of what is left."""

AUTO_DEVICES: tuple[type[Solver], ...] = (PoFo, DeviceSearch, XEngine)
"""What ``solver="auto"`` runs where there are several devices."""


OVERLAPPED: tuple[str, ...] = ("auto", "pofo", "device-search", "xengine")
"""What can make the overlapped time small."""


def chosen_solvers(
    name: str,
    *,
    has_several_devices: bool = False,
    objective: Objective = Objective.SERIAL,
    is_timed: bool = False,
    op_count: int | None = None,
) -> list[Solver]:
    """Return the solvers that ``name`` stands for: one, or the portfolio of ``auto``.

    Parameters
    ----------
    name
        ``"auto"``, or a key of :data:`SOLVERS`.
    has_several_devices, objective
        What is planned for.
    is_timed
        Whether time is limited; then the cheap ones of a portfolio come first.
    op_count
        How many ops the graph has, ``None`` for many.

    Raises
    ------
    SolverUnsuitableError
        If there is no solver of that name, or it cannot make small what is asked for.
    """
    if not isinstance(name, str) or name not in {"auto", *SOLVERS}:
        names = ", ".join(["auto", *SOLVERS])
        msg = f"unknown solver {name!r}; there are {names}"
        raise SolverUnsuitableError(msg)
    if objective is Objective.OVERLAPPED:
        _check_overlapped(name, has_several_devices=has_several_devices)
    if name == "auto":
        one_device = AUTO_IN_TIME if is_timed else AUTO
        is_small = op_count is not None and op_count <= SMALL_OPS
        exact = (Checkmate,) if is_small else ()
        chosen = AUTO_DEVICES if has_several_devices else (*one_device, *exact)
    else:
        chosen = (SOLVERS[name],)
    return [_made(make, objective) for make in chosen]


def _made(make: type[Solver], objective: Objective) -> Solver:
    if make is DeviceSearch:
        return DeviceSearch(objective=objective)
    if make is XEngine:
        return XEngine(objective=objective)
    return make()


def _check_overlapped(name: str, *, has_several_devices: bool) -> None:
    if not has_several_devices:
        msg = (
            "the overlapped objective is the time with devices and links at work "
            "together, but there is one device; give budgets for several, such as "
            "budget={'cuda:0': '6 GiB', 'host': '20 GiB'}, or leave objective='serial'"
        )
        raise SolverUnsuitableError(msg)
    if name not in OVERLAPPED:
        msg = (
            f"solver {name!r} knows the serial objective only; with "
            f"objective='overlapped' there are {', '.join(OVERLAPPED)}"
        )
        raise SolverUnsuitableError(msg)
