"""The contract that every solver keeps, and exhaustive searches to compare with.

:mod:`remat.testing.contract` holds the checks; graphs of a few ops and searches through
all schedules are beside it, published training graphs and the best that is known of
each in :mod:`remat.testing.instances`. May import planning and what is below it, and
never torch, but for :mod:`remat.testing.simulated_device`, which nothing here imports.
"""

from remat.testing.contract import SolverContract as SolverContract
from remat.testing.contract import budgets_between as budgets_between
from remat.testing.contract import rename_graph as rename_graph
from remat.testing.contract import scale_graph as scale_graph
from remat.testing.contract import store_all_peak_bytes as store_all_peak_bytes
