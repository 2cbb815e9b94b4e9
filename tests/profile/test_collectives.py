"""What exchanges between processes are taken to cost, by closed formulas."""

from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives

from remat.profile.collectives import LINK_BYTES_PER_S, collective_cost
from remat.profile.operators import OperatorCall

# Importing it has registered them.
assert _functional_collectives
EXCHANGES: Any = torch.ops._c10d_functional
SENT = 4 * 1024**2


@pytest.mark.parametrize(
    ("name", "made", "passed", "workspace"),
    [
        # As many bytes go round the ring twice, and gloo adds up in the output itself.
        ("all_reduce", SENT, 2 * SENT, 0),
        # gloo gathers into a block of its own.
        ("all_gather_into_tensor", 4 * SENT, 4 * SENT, 4 * SENT),
        # gloo adds up in a copy of the input.
        ("reduce_scatter_tensor", SENT // 4, SENT, SENT),
        ("all_to_all_single", SENT, SENT, 0),
        ("broadcast", SENT, SENT, 0),
    ],
)
def test_costs_are_those_of_a_ring_and_of_gloo(
    name: str, made: int, passed: int, workspace: int
) -> None:
    call = OperatorCall(
        getattr(EXCHANGES, name).default,
        (torch.empty(SENT // 4),),
        outputs=torch.empty(made // 4),
    )
    cost = collective_cost(call)
    latency_ns = 20_000
    assert cost.cost_ns == latency_ns + passed * 10**9 // LINK_BYTES_PER_S["cpu"]
    assert cost.workspace_bytes == workspace
    assert cost.output_sizes_bytes == (made,)
