"""The papers' programs, on their own abstractions: chains, joins and lower sets.

Each takes plain lists and small dataclasses, needs no torch, and can be imported from
here; docs/reference.md shows each in three lines.

May import search, core and native. Nothing here knows a training graph's ops; what
becomes of an answer there is the work of reductions.
"""

from remat.algorithms.chains import CHECKPOINTS_ONLY as CHECKPOINTS_ONLY
from remat.algorithms.chains import IN_PLACE as IN_PLACE
from remat.algorithms.chains import STRICT as STRICT
from remat.algorithms.chains import Backward as Backward
from remat.algorithms.chains import Block as Block
from remat.algorithms.chains import BlockStage as BlockStage
from remat.algorithms.chains import ChainPlan as ChainPlan
from remat.algorithms.chains import Forward as Forward
from remat.algorithms.chains import HostLink as HostLink
from remat.algorithms.chains import LevelPlan as LevelPlan
from remat.algorithms.chains import Load as Load
from remat.algorithms.chains import MemoryConvention as MemoryConvention
from remat.algorithms.chains import OffloadPlan as OffloadPlan
from remat.algorithms.chains import Stage as Stage
from remat.algorithms.chains import StageChain as StageChain
from remat.algorithms.chains import StageJoin as StageJoin
from remat.algorithms.chains import StageJoinPlan as StageJoinPlan
from remat.algorithms.chains import StageOption as StageOption
from remat.algorithms.chains import StorageLevel as StorageLevel
from remat.algorithms.chains import Store as Store
from remat.algorithms.chains import Turn as Turn
from remat.algorithms.chains import UnitPlan as UnitPlan
from remat.algorithms.chains import block_stage as block_stage
from remat.algorithms.chains import chain_forwards as chain_forwards
from remat.algorithms.chains import extra_forwards as extra_forwards
from remat.algorithms.chains import plan_chain as plan_chain
from remat.algorithms.chains import plan_disk_revolve as plan_disk_revolve
from remat.algorithms.chains import plan_hrevolve as plan_hrevolve
from remat.algorithms.chains import plan_join as plan_join
from remat.algorithms.chains import plan_join_any_turns as plan_join_any_turns
from remat.algorithms.chains import plan_join_by_branch as plan_join_by_branch
from remat.algorithms.chains import plan_offload as plan_offload
from remat.algorithms.chains import plan_rotor as plan_rotor
from remat.algorithms.chains import plan_stage_join as plan_stage_join
from remat.algorithms.chains import plan_two_turns as plan_two_turns
from remat.algorithms.chains import revolve_forwards as revolve_forwards
from remat.algorithms.chains import smallest_units as smallest_units
from remat.algorithms.lower_sets import Family as Family
from remat.algorithms.lower_sets import ForwardGraph as ForwardGraph
from remat.algorithms.lower_sets import LowerSetObjective as LowerSetObjective
from remat.algorithms.lower_sets import LowerSetQuery as LowerSetQuery
from remat.algorithms.lower_sets import Segmentation as Segmentation
from remat.algorithms.lower_sets import all_lower_sets as all_lower_sets
from remat.algorithms.lower_sets import ancestor_sets as ancestor_sets
from remat.algorithms.lower_sets import approximate_family as approximate_family
from remat.algorithms.lower_sets import chen_segmentation as chen_segmentation
from remat.algorithms.lower_sets import choose_family as choose_family
from remat.algorithms.lower_sets import plan_lower_sets as plan_lower_sets
from remat.algorithms.lower_sets import smallest_budget as smallest_budget
from remat.algorithms.lower_sets import sweep_lower_sets as sweep_lower_sets
