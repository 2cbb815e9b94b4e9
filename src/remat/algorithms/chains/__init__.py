"""Optimal schedules of chains, and of chains that join.

The pebble game on homogeneous chains and joins, the dynamic programs on chains of
unequal stages, and rematerialisation with offload on a chain. The programs and what
they take can be imported from here; what they mean is said where they are.
"""

from remat.algorithms.chains.blocks import Block as Block
from remat.algorithms.chains.blocks import BlockStage as BlockStage
from remat.algorithms.chains.blocks import block_stage as block_stage
from remat.algorithms.chains.conventions import CHECKPOINTS_ONLY as CHECKPOINTS_ONLY
from remat.algorithms.chains.conventions import IN_PLACE as IN_PLACE
from remat.algorithms.chains.conventions import STRICT as STRICT
from remat.algorithms.chains.conventions import MemoryConvention as MemoryConvention
from remat.algorithms.chains.joins import plan_join as plan_join
from remat.algorithms.chains.joins import plan_join_by_branch as plan_join_by_branch
from remat.algorithms.chains.joins import smallest_units as smallest_units
from remat.algorithms.chains.levels import LevelPlan as LevelPlan
from remat.algorithms.chains.levels import StorageLevel as StorageLevel
from remat.algorithms.chains.levels import plan_disk_revolve as plan_disk_revolve
from remat.algorithms.chains.levels import plan_hrevolve as plan_hrevolve
from remat.algorithms.chains.offload import OffloadPlan as OffloadPlan
from remat.algorithms.chains.offload import plan_offload as plan_offload
from remat.algorithms.chains.operations import Backward as Backward
from remat.algorithms.chains.operations import Forward as Forward
from remat.algorithms.chains.operations import Load as Load
from remat.algorithms.chains.operations import Store as Store
from remat.algorithms.chains.operations import Turn as Turn
from remat.algorithms.chains.plans import UnitPlan as UnitPlan
from remat.algorithms.chains.reexecution import (
    plan_join_any_turns as plan_join_any_turns,
)
from remat.algorithms.chains.reexecution import plan_two_turns as plan_two_turns
from remat.algorithms.chains.revolve import chain_forwards as chain_forwards
from remat.algorithms.chains.revolve import extra_forwards as extra_forwards
from remat.algorithms.chains.revolve import plan_chain as plan_chain
from remat.algorithms.chains.revolve import revolve_forwards as revolve_forwards
from remat.algorithms.chains.rotor import ChainPlan as ChainPlan
from remat.algorithms.chains.rotor import plan_rotor as plan_rotor
from remat.algorithms.chains.stage_joins import StageJoin as StageJoin
from remat.algorithms.chains.stage_joins import StageJoinPlan as StageJoinPlan
from remat.algorithms.chains.stage_joins import plan_stage_join as plan_stage_join
from remat.algorithms.chains.stages import Stage as Stage
from remat.algorithms.chains.stages import StageChain as StageChain
from remat.algorithms.chains.stages import StageOption as StageOption
from remat.search.schedule_paging import HostLink as HostLink
