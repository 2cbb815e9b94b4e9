"""Solvers, one file a method; the table of them is in the registry."""

from remat.solvers.base import Solver as Solver
from remat.solvers.checkmate import Checkmate as Checkmate
from remat.solvers.checkmate import CheckmateLpRounding as CheckmateLpRounding
from remat.solvers.chen import ChenGreedy as ChenGreedy
from remat.solvers.chen import ChenLowerSets as ChenLowerSets
from remat.solvers.chen import ChenSqrt as ChenSqrt
from remat.solvers.device_search import DeviceSearch as DeviceSearch
from remat.solvers.greedy_eviction import CANDIDATES as CANDIDATES
from remat.solvers.greedy_eviction import GreedyEviction as GreedyEviction
from remat.solvers.join import Join as Join
from remat.solvers.local_search import LocalSearch as LocalSearch
from remat.solvers.lower_sets import LowerSets as LowerSets
from remat.solvers.lower_sets import LowerSetsApprox as LowerSetsApprox
from remat.solvers.min_cut_retention import MinCutRetention as MinCutRetention
from remat.solvers.moccasin import Moccasin as Moccasin
from remat.solvers.pofo import PoFo as PoFo
from remat.solvers.registry import SOLVERS as SOLVERS
from remat.solvers.registry import chosen_solvers as chosen_solvers
from remat.solvers.registry import solver_name as solver_name
from remat.solvers.rockmate import Rockmate as Rockmate
from remat.solvers.rotor import Revolve as Revolve
from remat.solvers.rotor import Rotor as Rotor
from remat.solvers.store_all import StoreAll as StoreAll
from remat.solvers.xengine import XEngine as XEngine
from remat.solvers.xengine import XEnginePublished as XEnginePublished
