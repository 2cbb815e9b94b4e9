"""What operators cost, what a step takes, and what is needed outside the model.

May import capture. Nothing here decides what is recomputed.
"""

from remat.profile.cache import CostCache as CostCache
from remat.profile.cache import CostCacheWarning as CostCacheWarning
from remat.profile.cache import cache_directory as cache_directory
from remat.profile.estimate import Rates as Rates
from remat.profile.estimate import estimate_operators as estimate_operators
from remat.profile.estimate import estimate_workspace as estimate_workspace
from remat.profile.estimate import measure_rates as measure_rates
from remat.profile.memory import Measurement as Measurement
from remat.profile.memory import MemoryGrowth as MemoryGrowth
from remat.profile.memory import measure as measure
from remat.profile.memory import memory_growth as memory_growth
from remat.profile.operators import OperatorCall as OperatorCall
from remat.profile.operators import OperatorCost as OperatorCost
from remat.profile.operators import profile_operators as profile_operators
from remat.profile.optimizer_memory import LossMemory as LossMemory
from remat.profile.optimizer_memory import loss_bytes as loss_bytes
from remat.profile.optimizer_memory import optimizer_bytes as optimizer_bytes
