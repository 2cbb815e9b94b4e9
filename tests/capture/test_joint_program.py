"""The training graph of a traced step: what is read, written, random and named."""

import contextlib
from typing import Any

import pytest
import torch
from tests.modules import ConvNet, SharedBlock
from torch import nn

import remat
from remat.capture.joint_program import JointProgram
from remat.capture.surroundings import (
    Surroundings,
    add_surroundings,
    describe_input,
)
from remat.capture.tracing import compiled_entry
from remat.core.errors import CaptureError
from remat.core.graph import Op, Phase, Role
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.training.step_backend import PlannedBackend, StoppedBeforeRunningError


def trace(model: nn.Module, *args: Any) -> JointProgram:
    """Return the traced step of a model; nothing runs."""
    programs: list[JointProgram] = []

    def keep(program: JointProgram) -> tuple[JointProgram, Schedule]:
        programs.append(program)
        order = store_all_order(program.graph)
        return program, schedule_from_order(program.graph, order)

    backend = PlannedBackend(keep, type(model).__name__)
    backend.stop_before_running = True
    with contextlib.suppress(StoppedBeforeRunningError):
        compiled_entry(model, backend)(*args)
    return programs[0]


def ops_named(program: JointProgram, prefix: str) -> list[Op]:
    return [op for op in program.graph.ops if op.name.startswith(prefix)]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        left, right = y.view(-1, 2, 3).transpose(1, 2).unbind(2)
        return torch.sin(left[:, 1:]) + right.unsqueeze(0).squeeze(0)[:, :2]


def test_views_are_no_ops_and_share_the_storage() -> None:
    program = trace(Views(), torch.randn(5, 4))
    graph = program.graph
    forward = [op.name for op in graph.ops if op.phase is Phase.FORWARD]
    assert forward == ["addmm", "sin", "add"]
    addmm, sin, add = (graph.ops[i] for i in range(3))
    assert sin.reads == addmm.writes
    assert set(add.reads) == {*addmm.writes, *sin.writes}
    assert graph.storages[addmm.writes[0]].size_bytes == 5 * 6 * 4


def test_inputs_are_residents_with_the_users_names() -> None:
    graph = trace(Views(), torch.randn(5, 4)).graph
    residents = {
        s.name: (s.role, s.size_bytes) for s in graph.storages if s.is_resident
    }
    assert residents["linear.weight"] == (Role.PARAMETER, 96)
    assert residents["linear.bias"] == (Role.PARAMETER, 24)
    assert (Role.INPUT, 80) in residents.values()
    gradients = {s.name for s in graph.storages if s.role is Role.GRADIENT}
    assert gradients == {"gradient of linear.weight", "gradient of linear.bias"}


def test_ops_know_the_users_source_line() -> None:
    program = trace(Views(), torch.randn(5, 4))
    (sin,) = ops_named(program, "sin")
    assert "test_joint_program.py" in sin.source
    assert "torch.sin(left[:, 1:])" in sin.source
    sequential = trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    assert not [op for op in sequential.graph.ops if "tracing.py" in op.source]


def test_random_ops_are_ordered_and_read_the_generators_state() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Tanh()]
    model = nn.Sequential(*layers)
    program = trace(model, torch.randn(3, 4))
    states = ops_named(program, "rng_state")
    dropouts = [op for op in ops_named(program, "dropout_mask") if op.is_ordered]
    assert len(states) == len(dropouts) == len(program.random_states) == 2
    for state, dropout in zip(states, dropouts, strict=True):
        assert state.writes[0] in dropout.reads
        assert state.is_ordered
        assert state.non_recomputable is not None
        assert dropout.is_recomputable
    size = torch.get_rng_state().numel()
    assert program.graph.storages[states[0].writes[0]].size_bytes == size


def test_batch_norm_may_run_again_but_counters_may_not() -> None:
    program = trace(ConvNet(depth=2), torch.randn(2, 3, 8, 8))
    norms = ops_named(program, "_native_batch_norm_legit_functional")
    assert len(norms) == 2
    assert all(op.is_recomputable for op in norms)
    buffers = {i for i, s in enumerate(program.graph.storages) if s.role is Role.BUFFER}
    assert not [op for op in norms if buffers.intersection(op.reads)]
    counters = [op for op in ops_named(program, "add") if not op.is_recomputable]
    reasons = [op.non_recomputable or "" for op in counters]
    assert sum("num_batches_tracked" in reason for reason in reasons) == 2


class ReadsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mean = self.norm.running_mean
        assert mean is not None
        return torch.tanh(y) * torch.tanh(mean)


def test_statistics_that_are_read_again_pin_their_op() -> None:
    program = trace(ReadsStatistics(), torch.randn(3, 4))
    (norm,) = ops_named(program, "_native_batch_norm_legit_functional")
    assert norm.non_recomputable == "its new running statistics are read again"


def test_what_the_caller_holds_is_written_once() -> None:
    program = trace(Views(), torch.randn(5, 4))
    (add,) = [op for op in ops_named(program, "add") if op.name == "add"]
    assert add.writes[0] in program.graph.final_outputs
    assert add.non_recomputable == "the caller holds its output"


def test_tied_and_shared_parameters_are_one_storage() -> None:
    torch.manual_seed(0)
    model = SharedBlock()
    graph = trace(model, torch.randint(0, 11, (7,))).graph
    parameters = [s for s in graph.storages if s.role is Role.PARAMETER]
    expected = sum(p.nbytes for p in model.parameters())
    assert sum(s.size_bytes for s in parameters) == expected
    assert sum(s.role is Role.GRADIENT for s in graph.storages) == 5


def test_fingerprints_tell_steps_apart() -> None:
    x = torch.randn(5, 4)
    assert trace(Views(), x).fingerprint == trace(Views(), x).fingerprint
    assert trace(Views(), x).fingerprint != trace(Views(), x[:3]).fingerprint
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert trace(model, x).fingerprint != trace(other, x).fingerprint


def test_surroundings_are_residents_and_external_ops() -> None:
    program = trace(Views(), torch.randn(5, 4))
    surrounded = add_surroundings(
        program,
        Surroundings(
            resident_bytes={Role.PARAMETER: 1000, Role.OPTIMIZER_STATE: 500},
            loss_peak_bytes=300,
            loss_held_bytes=100,
            optimizer_workspace_bytes=50,
        ),
    )
    graph = surrounded.graph
    loss, step = (op for op in graph.ops if op.is_external)
    assert (loss.phase, loss.workspace_bytes) == (Phase.FORWARD, (200,))
    assert graph.storages[loss.writes[0]].size_bytes == 100
    assert (step.phase, step.workspace_bytes) == (Phase.BACKWARD, (50,))
    sizes = [s.size_bytes for s in graph.storages if s.role is Role.PARAMETER]
    assert sizes == [96, 24, 1000]
    assert [
        surrounded.op_nodes[i] for i, op in enumerate(graph.ops) if op.is_external
    ] == [
        None,
        None,
    ]
    schedule = schedule_from_order(graph, store_all_order(graph))
    assert simulate(graph, single_device(), schedule).violation is None


class ValueDependentSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y > 0].sum()


def test_sizes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"y\[y > 0\]") as caught:
        remat.plan(ValueDependentSize(), torch.randn(2, 4), budget="1 GiB")
    assert "test_joint_program.py" in str(caught.value)


def test_describe_input() -> None:
    assert describe_input("L['self']._modules['a']._buffers['b']").name == "a.b"
    assert describe_input("L['kwargs']['mask']").role is Role.INPUT


def test_dynamic_inputs_are_refused_with_advice() -> None:
    backend = PlannedBackend(lambda program: (program, Schedule(())), "x")
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    placeholder = module.graph.placeholder("size")
    module.graph.output(placeholder)
    with pytest.raises(CaptureError, match="dynamic=False"):
        backend.describe_inputs(module, [3])
