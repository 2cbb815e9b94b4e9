"""Recomputation by increasing sequences of lower sets of the forward graph.

The abstraction and the programs of Kusumoto et al. (NeurIPS 2019): a forward graph with
a size and a cost a node, families of its lower sets, and dynamic programs over
increasing sequences of them.

* :mod:`~remat.algorithms.lower_sets.forward_graph`: ``(V, E, M_v, T_v)``;
* :mod:`~remat.algorithms.lower_sets.families`,
  :mod:`~remat.algorithms.lower_sets.narrowest`,
  :mod:`~remat.algorithms.lower_sets.orders`,
  :mod:`~remat.algorithms.lower_sets.choice`: families, and the choice of one;
* :mod:`~remat.algorithms.lower_sets.programs`: smallest budget, least and most
  overhead;
  :mod:`~remat.algorithms.lower_sets.recurrences` holds the recurrences themselves;
* :mod:`~remat.algorithms.lower_sets.formula`,
  :mod:`~remat.algorithms.lower_sets.canonical`: what an answer
  costs, and the schedule that shows it to the judge;
* :mod:`~remat.algorithms.lower_sets.chen`: the method that the paper compares with.

The entry points can be imported from here.
"""

from remat.algorithms.lower_sets.chen import chen_segmentation as chen_segmentation
from remat.algorithms.lower_sets.choice import approximate_family as approximate_family
from remat.algorithms.lower_sets.choice import choose_family as choose_family
from remat.algorithms.lower_sets.families import Family as Family
from remat.algorithms.lower_sets.families import all_lower_sets as all_lower_sets
from remat.algorithms.lower_sets.families import ancestor_sets as ancestor_sets
from remat.algorithms.lower_sets.forward_graph import ForwardGraph as ForwardGraph
from remat.algorithms.lower_sets.programs import LowerSetObjective as LowerSetObjective
from remat.algorithms.lower_sets.programs import LowerSetQuery as LowerSetQuery
from remat.algorithms.lower_sets.programs import Segmentation as Segmentation
from remat.algorithms.lower_sets.programs import plan_lower_sets as plan_lower_sets
from remat.algorithms.lower_sets.programs import smallest_budget as smallest_budget
from remat.algorithms.lower_sets.programs import sweep_lower_sets as sweep_lower_sets
