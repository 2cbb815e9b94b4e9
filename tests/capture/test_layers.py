"""Blocks of a traced step carry the path of the module that made them."""

import pytest
import torch
from tests.modules import Attention
from torch import Tensor, nn

import remat
from remat.core.contributors import layer_of
from remat.core.graph import Role
from remat.planning.plan import Plan, load_plan


class Block(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.shared = shared or nn.LayerNorm(16)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x) + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"last one": nn.Linear(16, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["last one"](x).square().mean()


def layers_of(plan: Plan) -> dict[str, str]:
    """Return the layer of each block that an op writes, by the name of the op."""
    storages = plan.graph.storages
    return {
        op.name: layer_of(storages[op.writes[0]].name)[0]
        for op in plan.graph.ops
        if op.writes and storages[op.writes[0]].role is Role.ACTIVATION
    }


def planned(model: nn.Module, x: Tensor) -> Plan:
    return remat.plan(model, (x,), budget="100%", costs="estimated", solver="store-all")


def test_forward_and_backward_ops_name_their_layer() -> None:
    layers = layers_of(planned(Net(), torch.randn(8, 16)))
    assert layers["addmm"] == "blocks.0.up"
    assert layers["relu"] == "blocks.0"
    assert layers["addmm_1"] == "blocks.0.down"
    assert layers["addmm_6"] == "heads.last one"
    # Both calls of a module that is called twice.
    assert layers["native_layer_norm"].startswith("blocks.0.shared")
    assert layers["native_layer_norm_1"].startswith("blocks.0.shared")
    assert layers["threshold_backward"] == "blocks.2 backward"
    backward = {layer for op, layer in layers.items() if op.startswith("mm")}
    assert {"blocks.2.down backward", "blocks.1.up backward"} <= backward


def test_an_op_of_the_model_itself_has_no_layer() -> None:
    layers = layers_of(planned(Net(), torch.randn(8, 16)))
    assert layers["pow_1"] == ""


def test_layers_of_what_torch_compile_traces() -> None:
    """Its names of modules begin otherwise."""
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(4, 32, 16)
    backend = remat.backend(budget=1, costs="estimated", model=model)
    with pytest.raises(Exception, match=r"activation \d\.\w+( backward)? \(\w+\)"):
        torch.compile(model, backend=backend)(x)


def test_the_error_and_the_plan_name_layers_and_parameters(tmp_path) -> None:
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(4, 32, 16)
    with pytest.raises(remat.BudgetError) as refused:
        remat.plan(model, (x,), budget=1, costs="estimated")
    message = str(refused.value)
    assert "up (addmm)" in message or "up backward (" in message
    plan = remat.plan(model, (x,), budget="100%", costs="estimated")
    text = str(plan)
    assert "activation {0-1}.up (addmm) x 2" in text
    plan.save(tmp_path / "plan.json")
    assert str(load_plan(tmp_path / "plan.json")) == text
