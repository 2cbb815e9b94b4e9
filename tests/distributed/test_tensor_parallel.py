"""Models whose tensors are divided among processes train within a budget, bitwise."""

import os
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import remat
from remat.core.errors import CaptureError, PlanWarning
from remat.core.platform import single_device
from remat.core.rules import Rule
from remat.core.schedule import Compute, Schedule
from remat.core.simulator import simulate
from remat.profile.allocations import AllocationRecorder
from tests.distributed.processes import in_processes

WIDTH, HEADS, WORDS = 64, 8, 96
STEPS = 3
REPEATS = 6
"""Of them the lowest peak counts: where a thread of the process group is the last that
lets go of a block, its release is not seen."""

KEPT = "all processes of a group take part in it"


class Block(nn.Module):
    """A block of a transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        inner = nn.functional.gelu(self.wide(self.norm2(x)))
        return x + nn.functional.dropout(self.narrow(inner), 0.1, self.training)


class Language(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids))).flatten(0, 1)


def local(tensor: Any) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def by_tensors(mesh: DeviceMesh) -> nn.Module:
    """Return a model of which each process has a part of each layer."""
    torch.manual_seed(0)
    model = Language()
    plan: Any = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    for name in ("q", "k", "v", "wide"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("o", "narrow"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def by_sequence(mesh: DeviceMesh) -> nn.Module:
    """Return blocks between whose layers each process has a part of the sequence."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    plan: Any = {"*.norm": SequenceParallel(), "*.norm2": SequenceParallel()}
    for name in ("q", "k", "v", "wide"):
        plan[f"*.{name}"] = ColwiseParallel(input_layouts=Shard(1))
    for name in ("o", "narrow"):
        plan[f"*.{name}"] = RowwiseParallel(
            output_layouts=Shard(1), use_local_output=False
        )
    parallelize_module(model, mesh, plan)
    whole, part = (Replicate(),), (Shard(1),)
    ends = PrepareModuleInputOutput(
        input_layouts=whole,
        desired_input_layouts=part,
        output_layouts=part,
        desired_output_layouts=whole,
    )
    return parallelize_module(model, mesh, ends)


def step(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """Train for one step; return the loss."""
    # The caller holds what the model returns, as a plan reckons.
    outputs = model(batch)
    loss = loss_of(outputs, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def loss_of(outputs: Any, batch: torch.Tensor) -> Any:
    """Return a loss of the model's outputs."""
    if batch.is_floating_point():
        return outputs.square().mean()
    return nn.functional.cross_entropy(outputs, batch.flatten())


def trained(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> list[Any]:
    """Return losses, parameters and random state after some steps."""
    torch.manual_seed(5)
    losses = [step(model, batch, optimizer) for _ in range(STEPS)]
    held = [local(parameter).detach().clone() for parameter in model.parameters()]
    return [*losses, *held, torch.get_rng_state()]


def peaks(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> list[int]:
    """Return measured peaks of a step."""
    return [
        remat.measure(
            lambda: step(model, batch, optimizer),
            warmup=1,
            repeats=0,
            resident=[model, batch, optimizer],
        ).peak_bytes
        for _ in range(REPEATS)
    ]


def judged(plan: Any) -> list[Any]:
    """Return what the judge says of schedules that exchange again, or in disorder.

    And the names of the exchanges, in the order of the schedule.
    """
    graph, steps = plan.graph, plan.schedule.steps
    sent = {
        place: graph.ops[step.op].name
        for place, step in enumerate(steps)
        if isinstance(step, Compute)
        and KEPT in (graph.ops[step.op].non_recomputable or "")
    }
    one, other = list(sent)[:2]
    again = (*steps[: one + 1], *steps[one:])
    swapped = (*steps[:one], steps[other], *steps[one:other], *steps[other + 1 :])
    found: list[Any] = []
    for each in (again, swapped):
        trace = simulate(graph, single_device(kind="cpu"), Schedule(each))
        found.append(None if trace.violation is None else trace.violation.rule)
    return [*found, *sent.values()]


def run(rank: int) -> dict[str, Any]:
    """Return what one process finds."""
    mesh = init_device_mesh("cpu", (2,))
    ids = torch.randint(0, WORDS, (8, 32), generator=torch.Generator().manual_seed(1))
    floats = torch.randn(8, 32, WIDTH, generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for name, make, batch in (
        ("tensors", by_tensors, ids),
        ("sequence", by_sequence, floats),
    ):
        plain = make(mesh)
        optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
        expected = trained(plain, batch, optimizer)
        budget = min(peaks(plain, batch, optimizer)) * 8 // 10
        model = make(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        plan = remat.fit(
            model,
            batch,
            budget=budget,
            optimizer=optimizer,
            costs="estimated",
            loss=partial(loss_of, batch=batch),
        )
        actual = trained(model, batch, optimizer)
        found[name] = {
            "is_equal": all(map(torch.equal, actual, expected)),
            "budget": budget,
            "predicted": plan.peak_bytes,
            "measured": peaks(model, batch, optimizer),
            "recomputed": plan.recomputed_op_count,
            "judged": judged(plan),
        }
        loss_of(model(batch), batch).backward()
        found[name]["gradients"] = {
            type(p.grad).__name__ for p in model.parameters() if hasattr(p, "to_local")
        }
    with pytest.raises(CaptureError) as caught:
        remat.fit(by_tensors(mesh), ids, budget="70%", regions="blocks")
    found["blocks"] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What two processes found."""
    return in_processes(run)


@pytest.mark.parametrize("case", ["tensors", "sequence"])
def test_a_parallel_step_is_within_its_budget_and_bitwise(
    results: list[dict[str, Any]], case: str
) -> None:
    for found in (result[case] for result in results):
        assert found["is_equal"]
        assert found["recomputed"] > 0
        assert found["predicted"] <= found["budget"]
        assert min(found["measured"]) <= found["budget"]
        assert min(found["measured"]) == pytest.approx(found["predicted"], rel=0.01)
        assert found["gradients"] == {"DTensor"}


@pytest.mark.parametrize("case", ["tensors", "sequence"])
def test_the_judge_refuses_to_exchange_twice_or_in_another_order(
    results: list[dict[str, Any]], case: str
) -> None:
    for again, swapped, *names in (result[case]["judged"] for result in results):
        assert again is Rule.RECOMPUTED
        # The first two gather one tensor in sequences, and depend on another else.
        assert swapped is (Rule.ORDER if case == "sequence" else Rule.READ_NOT_LIVE)
        assert names == results[0][case]["judged"][2:]
        assert len(set(names)) == len(names) > 4


def test_blocks_of_such_a_model_are_refused_with_the_cure(
    results: list[dict[str, Any]],
) -> None:
    assert all("regions='whole'" in result["blocks"] for result in results)


def of_equal_meshes(_rank: int) -> list[Any]:
    """Return gradients of equal models under autocast, each with a mesh of its own.

    Of one that is plain and of one that is fitted, and the class of the fitted one's
    mesh. Before them another one is traced in full precision.
    """
    batch = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))

    def made(*, is_fitted: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        if is_fitted:
            remat.fit(model, batch, budget="1 GiB", costs="estimated")
        return model

    def gradients(model: nn.Module, *, is_lower: bool) -> tuple[Any, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_lower):
            loss = model(batch).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    gradients(made(is_fitted=True), is_lower=False)
    plain = gradients(made(is_fitted=False), is_lower=True)
    fitted = gradients(made(is_fitted=True), is_lower=True)
    meshes = {type(gradient.device_mesh) for gradient in fitted}
    return [list(map(local, plain)), list(map(local, fitted)), meshes]


def test_a_mesh_that_is_a_constant_of_the_trace_is_carried_through() -> None:
    for plain, fitted, meshes in in_processes(of_equal_meshes):
        assert all(map(torch.equal, fitted, plain))
        assert meshes == {DeviceMesh}


def of_rows(_rank: int) -> dict[str, tuple[Any, ...]]:
    """Return what optimizers take whose gradients are not divided as parameters are.

    Those of an embedding are whole in each process, which has a part of the rows. Per
    case what was predicted, measured and warned of.
    """
    mesh = init_device_mesh("cpu", (2,))
    ids = torch.randint(0, 8, (4, 4), generator=torch.Generator().manual_seed(1))
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    found: dict[str, tuple[Any, ...]] = {}
    for name, make, is_stepped in (
        ("plain", partial(torch.optim.SGD, lr=0.1), False),
        ("momentum", momentum, False),
        ("momentum that is there", momentum, True),
        ("Adagrad", torch.optim.Adagrad, False),
        ("AdamW", torch.optim.AdamW, False),
    ):
        layers = nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, 8), nn.Flatten(0, 1)
        rows = RowwiseParallel(input_layouts=Replicate())
        model = parallelize_module(nn.Sequential(*layers), mesh, {"0": rows})
        optimizer = make(model.parameters())
        if is_stepped:
            step(model, ids, optimizer)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            plan = remat.fit(
                model, ids, budget="1 GiB", optimizer=optimizer, costs="estimated"
            )
            measured = peaks(model, ids, optimizer)
        told = [str(w.message) for w in warned if w.category is PlanWarning]
        found[name] = plan.peak_bytes, min(measured), told
    return found


def test_optimizers_are_counted_with_gradients_divided_otherwise() -> None:
    for found in in_processes(of_rows):
        for name, (predicted, measured, told) in found.items():
            assert measured == pytest.approx(predicted, rel=0.01), name
            assert not told, name


def policies(_rank: int) -> list[int]:
    """Return how a thread is scheduled before, while and after it is recorded.

    And after a recording in which it chose for itself.
    """
    found = [os.sched_getscheduler(0)]
    with AllocationRecorder():
        found.append(os.sched_getscheduler(0))
    found.append(os.sched_getscheduler(0))
    with AllocationRecorder():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    found.append(os.sched_getscheduler(0))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_what_is_recorded_takes_no_processor_from_a_thread_that_exchanges() -> None:
    expected = [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_IDLE]
    assert in_processes(policies) == [expected] * 2
    with AllocationRecorder():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
