"""Optimal schedules of chains, and of chains that join.

The pebble game on homogeneous chains and joins, the dynamic programs on chains of
unequal stages, and rematerialisation with offload on a chain. The programs and what
they take can be imported from here; what they mean is said where they are.
"""

from remat.chains.blocks import Block as Block
from remat.chains.blocks import block_stage as block_stage
from remat.chains.conventions import CHECKPOINTS_ONLY as CHECKPOINTS_ONLY
from remat.chains.conventions import IN_PLACE as IN_PLACE
from remat.chains.conventions import STRICT as STRICT
from remat.chains.conventions import MemoryConvention as MemoryConvention
from remat.chains.joins import plan_join as plan_join
from remat.chains.joins import plan_join_by_branch as plan_join_by_branch
from remat.chains.joins import smallest_units as smallest_units
from remat.chains.levels import StorageLevel as StorageLevel
from remat.chains.levels import plan_disk_revolve as plan_disk_revolve
from remat.chains.levels import plan_hrevolve as plan_hrevolve
from remat.chains.offload import plan_offload as plan_offload
from remat.chains.paging import Bandwidth as Bandwidth
from remat.chains.reexecution import plan_join_any_turns as plan_join_any_turns
from remat.chains.reexecution import plan_two_turns as plan_two_turns
from remat.chains.revolve import chain_forwards as chain_forwards
from remat.chains.revolve import plan_chain as plan_chain
from remat.chains.revolve import revolve_forwards as revolve_forwards
from remat.chains.rotor import plan_rotor as plan_rotor
from remat.chains.stage_joins import StageJoin as StageJoin
from remat.chains.stage_joins import plan_stage_join as plan_stage_join
from remat.chains.stages import Stage as Stage
from remat.chains.stages import StageChain as StageChain
from remat.chains.stages import StageOption as StageOption
