"""A plan for one of many simulated processes counts what closed formulas say."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from studies.shard_sizes import adamw_bytes, gathered_bytes, piece_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import remat
from remat.core.graph import Role
from tests.distributed.models import Language, batch_of


@pytest.fixture(params=[64, 512])
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many processes there are, of which this is the only one."""
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=request.param, store=store)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_bytes_of_each_process_are_those_of_closed_formulas(processes: int) -> None:
    model = Language(2)
    mesh = init_device_mesh("cpu", (processes,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    plan = remat.plan(
        model, batch_of(0), budget="100%", optimizer=optimizer, costs="estimated"
    )
    storages = plan.graph.storages
    of_role = {
        role: sum(s.size_bytes for s in storages if s.role is role) for role in Role
    }
    everything = list(model.parameters())
    all_bytes = piece_bytes(everything, processes)
    assert of_role[Role.PARAMETER] == all_bytes
    assert of_role[Role.OPTIMIZER_STATE] == adamw_bytes(everything, processes)
    made = {
        op.name: sum(storages[storage].size_bytes for storage in op.writes)
        for op in plan.graph.ops
    }
    block = list(model.blocks[0].parameters())
    inside = {id(parameter) for parameter in model.blocks.parameters()}
    outside = [p for p in everything if id(p) not in inside]
    # Gathered from pieces padded to as many rows, and handed out in such pieces.
    whole_bytes = sum(p.nbytes for p in Language(1).blocks.parameters())
    padded_bytes = gathered_bytes(block, processes)
    assert padded_bytes >= whole_bytes
    assert made["pieces of blocks.0"] == made["gradients of blocks.1"] == padded_bytes
    assert made["gathering of blocks.1"] == padded_bytes
    assert made["pieces of gradients of blocks.1"] == piece_bytes(block, processes)
    assert made["gradients of the model"] == gathered_bytes(outside, processes)
    assert made["pieces of gradients of the model"] == piece_bytes(outside, processes)
    # A hook gathers there, for the whole backward pass.
    nodes = [op.workspace_bytes[0] for op in plan.graph.ops if "Backward" in op.name]
    assert nodes
    assert max(nodes) < min(padded_bytes, gathered_bytes(outside, processes))
    left = [v for name, v in made.items() if name.startswith("pieces of gradients")]
    assert sum(left) == all_bytes
