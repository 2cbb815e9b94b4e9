"""Operators write over an argument that dies with them, and nowhere else.

That the numbers of whole steps stay the same is tested in ``test_exactness``.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.modules import CASES, make_case
from tests.runtime.test_exactness import recompute_everything
from torch import Tensor, fx, nn

import remat
from remat.capture.joint_program import JointProgram, is_view
from remat.capture.tracing import compiled_entry
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.schedule import Compute, Schedule
from remat.core.simulator import simulate
from remat.profile.allocations import record_allocations
from remat.runtime.lowering import lower
from remat.runtime.overwriting import (
    VARIANTS,
    OverwritingVariant,
    overwritable_argument,
)
from remat.training.step_backend import PlannedBackend, StoppedBeforeRunningError
from remat.training.verification import TrainingStep, compare

aten = torch.ops.aten

KEYWORDS = {variant.target: variant.keyword for variant in VARIANTS.values()}


def keep_everything(graph: TrainingGraph) -> Schedule:
    return schedule_from_order(graph, store_all_order(graph))


def recompute_once(graph: TrainingGraph) -> Schedule:
    return recompute_everything(graph, is_repeated=False)


def recompute_always(graph: TrainingGraph) -> Schedule:
    return recompute_everything(graph, is_repeated=True)


BACKWARD_OF_RELU = {aten.threshold_backward.default}
SCHEDULES = [keep_everything, recompute_once, recompute_always]


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> JointProgram:
    """Return the traced step of a model; nothing runs."""
    programs: list[JointProgram] = []

    def keep(program: JointProgram) -> tuple[JointProgram, Schedule]:
        programs.append(program)
        return program, keep_everything(program.graph)

    backend = PlannedBackend(keep, type(model).__name__)
    backend.stop_before_running = True
    with contextlib.suppress(StoppedBeforeRunningError):
        compiled_entry(model, backend)(*args, **(kwargs or {}))
    return programs[0]


def overwritten(node: fx.Node) -> fx.Node | None:
    """Return the value that an emitted node writes over, or ``None``."""
    target: Any = node.target
    if node.op != "call_function" or target not in KEYWORDS:
        return None
    keyword = KEYWORDS[target]
    found = node.args[0] if keyword is None else node.kwargs[keyword]
    assert isinstance(found, fx.Node)
    return found


def overwriting_ops(program: JointProgram, schedule: Schedule) -> list[str]:
    """Return the names of the emitted ops that overwrite, of both passes."""
    lowered = lower(program, schedule)
    nodes = [*lowered.forward.graph.nodes, *lowered.backward.graph.nodes]
    return [node.name for node in nodes if overwritten(node) is not None]


def blocks(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return, per emitted node, the node that first gave its block a value.

    Found from the operators' own schemas; shares nothing with the lowering.
    """
    block_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        target = overwritten(node)
        if target is not None:
            block_of[node] = block_of[target]
        elif node.op == "call_function" and is_view(node):
            block_of[node] = block_of[node.all_input_nodes[0]]
        else:
            block_of[node] = node
    return block_of


@pytest.mark.parametrize("make_schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_only_own_blocks_that_nothing_reads_again_are_overwritten(
    name: str, make_schedule: Callable[[TrainingGraph], Schedule]
) -> None:
    case = make_case(name)
    program = trace(case.model, case.args, case.kwargs)
    lowered = lower(program, make_schedule(program.graph))
    for module in (lowered.forward, lowered.backward):
        block_of = blocks(module.graph)
        # Since an overwrite: the nodes whose old value is gone.
        gone: set[fx.Node] = set()
        for node in module.graph.nodes:
            stale = [source for source in node.all_input_nodes if source in gone]
            assert not stale, f"{node.format_node()} reads overwritten {stale}"
            target = overwritten(node)
            if target is None:
                continue
            block = block_of[target]
            assert block.op == "call_function", f"{block.op} {block} is overwritten"
            others = {s for s in node.all_input_nodes if block_of[s] is block}
            assert others == {target}
            gone |= {n for n, b in block_of.items() if b is block and n < node}


ARGUMENTS: dict[str, int] = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "exp": 1, "tanh": 1, "sigmoid": 1,
    "rsqrt": 1, "sqrt": 1, "silu": 1, "tanh_backward": 2, "sigmoid_backward": 2,
    "silu_backward": 2, "threshold_backward": 2, "relu": 1,
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "channels last": lambda x: x.reshape(7, 4, 5, 9).to(
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("functional", VARIANTS, ids=str)
def test_variant_writes_the_same_bits_and_allocates_nothing(
    functional: Any, layout: str, dtype: torch.dtype
) -> None:
    variant = VARIANTS[functional]
    count = ARGUMENTS[functional._schema.name.removeprefix("aten::")]
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -3e38])
    values = [torch.randn(7, 20, 9) for _ in range(count)]
    for position, value in enumerate(values):
        value.flatten()[position * 3 :][: len(special)] = special
    arguments = [LAYOUTS[layout](value.to(dtype)) for value in values]
    rest = [0.25] if functional is aten.threshold_backward.default else []
    for position in range(count if variant.keyword else 1):
        expected = functional(*arguments, *rest)
        mine = [argument.clone() for argument in arguments]
        block = mine[position]
        keywords = {} if variant.keyword is None else {variant.keyword: block}

        def run(mine: list[Tensor] = mine, keywords: Any = keywords) -> Tensor:
            return variant.target(*mine, *rest, **keywords)

        recording, result = record_allocations(run)
        found = cast("Tensor", result)
        assert found.data_ptr() == block.data_ptr()
        assert found.stride() == expected.stride()
        assert not compare({"": expected}, {"": found})
        assert recording.peak_bytes() < block.untyped_storage().nbytes() // 4


def test_every_kind_of_schedule_overwrites_something() -> None:
    case = make_case("conv net")
    program = trace(case.model, case.args)
    for make_schedule in SCHEDULES:
        assert len(overwriting_ops(program, make_schedule(program.graph))) > 3


class Chain(nn.Module):
    """Residual additions, whose gradients add up, and a use of ``first`` at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(x))
        y = first + torch.relu(self.second(first))
        return (y * 2.0 + first).sum()


def test_fullest_step_is_left_as_scheduled() -> None:
    program = trace(Chain(), (torch.randn(4096, 8),))
    schedule = keep_everything(program.graph)
    (timeline,) = simulate(program.graph, single_device(), schedule).timeline_bytes
    steps = [s for p, s in enumerate(schedule.steps) if timeline[p] == max(timeline)]
    fullest = {
        program.graph.ops[step.op].name for step in steps if isinstance(step, Compute)
    }
    found = overwriting_ops(program, schedule)
    assert fullest
    assert found
    assert not fullest.intersection(found)


def test_overwriting_saves_memory_below_the_peak_and_none_at_it() -> None:
    model, x = Chain(), torch.randn(4096, 8)
    plan = remat.fit(model, (x,), budget="1 GiB")
    step = TrainingStep(model, (x,), {}, None, None)
    with step.restored():
        installed = model._compiled_call_impl
        peak_bytes = step.peak_bytes(installed)
    assert peak_bytes <= plan.peak_bytes <= peak_bytes + 1024


@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_saved_values_survive_a_second_backward_pass() -> None:
    model, x = Chain(), torch.randn(64, 8)
    model(x).backward()
    expected = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert len(expected) == 4
    remat.fit(model, (x,), budget="1 GiB")
    loss = model(x)
    for _ in range(2):
        gradients = torch.autograd.grad(
            loss, list(model.parameters()), retain_graph=True
        )
        found = dict(zip(expected, gradients, strict=True))
        assert not compare(expected, found)


class TransposedSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y + y.t()).sum()


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.linear(x).t()).sum()


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x.bfloat16()) + x).sum()


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x)[:4] + x.repeat(1, 2)[:4]).sum()


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.offset = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.linear(x).t()).sum()


class Converted(nn.Module):
    """An integer of four bytes becomes a float of four bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * ((x > 0).int() + 0.5)).sum()


class PooledToOneRow(nn.Module):
    """Maps of one row, one of whose strides says nothing of where its numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(3, 32, (16, 3)),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 4, 1, bias=False),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x).square().mean()


def test_strides_that_say_nothing_are_not_handed_on() -> None:
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    program = trace(PooledToOneRow(), (x,))
    (node,) = [n for _, n in program.calls() if n.target in BACKWARD_OF_RELU]
    values = [each.meta["val"] for each in (node, *node.all_input_nodes)]
    assert {value.shape for value in values} == {(4, 32, 1, 14)}
    assert len({value.stride() for value in values}) == 1
    written = {storage for op in program.graph.ops for storage in op.writes}
    assert overwritable_argument(program, node, written) is None


def test_the_usual_strides_of_one_column_are_sure() -> None:
    model = nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 4))
    program = trace(model, (torch.randn(8, 8),))
    (node,) = [n for _, n in program.calls() if n.target in BACKWARD_OF_RELU]
    written = {storage for op in program.graph.ops for storage in op.writes}
    assert overwritable_argument(program, node, written) is not None


@pytest.mark.parametrize(
    "module", [TransposedSum, Broadcast, Widened, Sliced, Transposed, Converted]
)
def test_another_layout_or_another_view_is_not_overwritten(
    module: Callable[[], nn.Module],
) -> None:
    assert found_for_add(module()) is None


def test_the_very_layout_is_overwritten() -> None:
    assert found_for_add(Chain()) == (VARIANTS[aten.add.Tensor], 0)


def found_for_add(model: nn.Module) -> tuple[OverwritingVariant, int] | None:
    """Return what may be overwritten by ``add`` if nothing is read after it."""
    program = trace(model, (torch.randn(8, 8),))
    (node,) = [node for _, node in program.calls() if node.name == "add"]
    written = {storage for op in program.graph.ops for storage in op.writes}
    return overwritable_argument(program, node, written)


def test_block_of_another_size_is_not_overwritten() -> None:
    # The real kernel may allocate more than the fake one promises.
    program = trace(Chain(), (torch.randn(64, 8),))
    before = overwriting_ops(program, keep_everything(program.graph))
    (relu,) = [op for op in program.graph.ops if op.name == "relu"]
    assert "relu" in before
    storages = list(program.graph.storages)
    (addmm,) = [s for s in relu.reads if not storages[s].is_resident]
    storages[addmm] = replace(
        storages[addmm], size_bytes=storages[addmm].size_bytes + 64
    )
    program.graph = replace(program.graph, storages=tuple(storages))
    assert "relu" not in overwriting_ops(program, keep_everything(program.graph))
