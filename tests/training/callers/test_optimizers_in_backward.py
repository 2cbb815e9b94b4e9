"""Optimizers that step in backward: the bytes of a step, and its bits."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import remat
from remat.core.errors import ExecutionError, PlanWarning
from remat.core.gradient_pieces import STEPPING
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.schedule import Compute, Discard, Schedule
from remat.core.simulator import simulate
from remat.planning.smallest_budget import smallest_budget
from remat.profile.memory import measure
from remat.profile.optimizers_in_backward import OptimizersInBackward, optimizer_memory
from remat.solvers import registry
from remat.solvers.base import ProgressCallback
from remat.training import step_planning

Optimizers = dict[nn.Parameter, Optimizer]
Make = Callable[[nn.Parameter], Optimizer]

WIDTH = 640


def adamw(parameter: nn.Parameter) -> Optimizer:
    return AdamW([parameter], lr=1e-3)


def momentum(parameter: nn.Parameter) -> Optimizer:
    return SGD([parameter], lr=1e-2, momentum=0.9)


def adafactor(parameter: nn.Parameter) -> Optimizer:
    return Adafactor([parameter], lr=1e-3)


class Stack(nn.Module):
    """Equal blocks, one layer that two of them share, and a break between them."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(4)
        )
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x, 0)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.part(x, 2).square().mean()

    def part(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for block in list(self.blocks)[first : first + 2]:
            x = x + block(x)
        return functional.gelu(self.shared(x))


class ReadsEarly(nn.Module):
    """Reads the weight of its last layer at its beginning, without a gradient.

    Through itself, or through a buffer in the same memory.
    """

    def __init__(self, *, by_buffer: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        alias = self.last.weight.detach() if by_buffer else None
        self.register_buffer("alias", alias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alias: Any = self.alias
        weight = self.last.weight.detach() if alias is None else alias
        first = self.layers[0](x) + functional.linear(x, weight)
        return self.last(self.layers(functional.gelu(first))).square().mean()


class Borrows(nn.Module):
    """Its first part reads a weight of its last one, without a gradient."""

    class First(nn.Module):
        def __init__(self, last: nn.Linear) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
            self.weight_of: Callable[[], torch.Tensor] = lambda: last.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            borrowed = functional.linear(x, self.weight_of().detach())
            first, second = self.layers
            return second(functional.gelu(first(x) + borrowed))

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = self.First(self.last)
        self.rest = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rest(functional.gelu(self.first(x)))).square().mean()


def stepped(model: nn.Module, make: Make = adamw) -> Optimizers:
    """Let hooks of a model's parameters step optimizers of their own."""
    optimizers = {parameter: make(parameter) for parameter in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return optimizers


def made(kind: Callable[[], nn.Module], make: Make) -> tuple[nn.Module, Optimizers]:
    torch.manual_seed(0)
    model = kind()
    return model, stepped(model, make)


def batch() -> torch.Tensor:
    return torch.randn(768, WIDTH, generator=torch.Generator().manual_seed(1))


def peaks_bytes(
    model: nn.Module, optimizers: Optimizers, x: torch.Tensor
) -> Sequence[int]:
    """Train for three steps, and return the peak of each."""
    torch.manual_seed(2)
    resident = [model, x, *optimizers.values()]
    return [
        measure(
            lambda: model(x).backward(), warmup=0, repeats=0, resident=resident
        ).peak_bytes
        for _ in range(3)
    ]


def trained(kind: Callable[[], nn.Module], make: Make) -> nn.Module:
    model, optimizers = made(kind, make)
    peaks_bytes(model, optimizers, batch())
    return model


@pytest.mark.parametrize(
    ("kind", "make", "regions"),
    [
        (Stack, adamw, "whole"),
        (Stack, momentum, ["blocks.*"]),
        (lambda: Stack(breaks=True), adafactor, "breaks"),
        (ReadsEarly, adamw, "whole"),
        (lambda: ReadsEarly(by_buffer=True), adamw, "whole"),
        (Borrows, adamw, ["first", "rest", "last"]),
    ],
    ids=["whole", "blocks", "breaks", "reads early", "buffer", "borrows"],
)
@pytest.mark.parametrize("budget", ["100%", "72%"])
def test_gradients_do_not_count_beside_each_other(
    kind: Callable[[], nn.Module], make: Make, regions: Any, budget: str
) -> None:
    model, optimizers = made(kind, make)
    x = batch()
    if kind is Borrows and budget != "100%":
        budget = "82%"
    plan = remat.fit(model, (x,), budget=budget, optimizer=optimizers, regions=regions)
    assert plan.budget_bytes is not None
    peak_bytes = max(peaks_bytes(model, optimizers, x))
    assert peak_bytes <= plan.budget_bytes
    # Inputs in the same memory count each for itself.
    shared_bytes = sum(buffer.nbytes for buffer in model.buffers())
    assert 0.999 * (plan.peak_bytes - shared_bytes) < peak_bytes <= plan.peak_bytes
    for mine, other in zip(
        model.parameters(), trained(kind, make).parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    assert (plan.recomputed_op_count > 0) == (budget != "100%")


@pytest.mark.parametrize("regions", ["whole", ["blocks.*"]])
def test_weights_that_are_most_of_a_step_need_no_gradients_beside_them(
    regions: Any,
) -> None:
    model, optimizers = made(Stack, momentum)
    x = batch()[:8].clone()
    plan = remat.fit(model, (x,), budget="100%", optimizer=optimizers, regions=regions)
    peak_bytes = max(peaks_bytes(model, optimizers, x))
    assert 0.999 < peak_bytes / plan.peak_bytes <= 1
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    later = SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    together = remat.plan(model, (x,), budget="100%", optimizer=later, regions=regions)
    # Weights, momentum, and gradients of all.
    assert together.peak_bytes > 3 * weight_bytes
    assert plan.peak_bytes < 2.9 * weight_bytes


def test_what_is_read_again_steps_when_backward_has_returned() -> None:
    model, optimizers = made(ReadsEarly, adamw)

    def plan(budget: str) -> remat.Plan:
        # With equal costs each time.
        return remat.plan(
            model, (batch(),), budget=budget, optimizer=optimizers, costs="estimated"
        )

    ample, tight = plan("100%"), plan("71%")
    counts = [
        sum(op.name == STEPPING for op in plan.graph.ops) for plan in (ample, tight)
    ]
    # The last layer's weight is read when the first activation is computed again.
    assert counts[1] == counts[0] - 1
    # Of other schedules, in which it leaves early as well, nothing is proved.
    assert tight.certificate is None


class Views(nn.Module):
    """Reads weights in several ways, of which backward may go in many orders."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.03)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.03)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.parts.chunk(3)
        hidden = functional.gelu(x @ one.T) * torch.sigmoid(x @ two.T) + x @ three.T
        turned = hidden @ self.other + hidden @ self.other.T
        hidden = functional.gelu(turned + self.other.diagonal() * hidden)
        return (hidden @ self.parts[:WIDTH].T).square().mean()


@pytest.mark.parametrize("kind", [Stack, Views])
def test_a_named_budget_works(kind: Callable[[], nn.Module]) -> None:
    model, optimizers = made(kind, adamw)
    x = batch()
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, (x,), budget="20%", optimizer=optimizers)
    required_bytes = caught.value.required_bytes
    remat.fit(model, (x,), budget=required_bytes, optimizer=optimizers)
    assert max(peaks_bytes(model, optimizers, x)) <= required_bytes


class Scaled(nn.Module):
    """Reads its last weight through something that is easily computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.last.weight.detach().amax()
        return (self.last(self.first(x)) * scale).square().mean()


class ComputesOnceMore:
    """Answers with the frugal schedule, and reads a parameter that has stepped."""

    schedule_class: ClassVar[str] = "one schedule"
    is_exact: ClassVar[bool] = False

    def solve(
        self, problem: Problem, _limits: Limits, _on_progress: ProgressCallback
    ) -> Proposal:
        graph = problem.graph
        steps = smallest_budget(graph).schedule.steps
        (again,) = (i for i, op in enumerate(graph.ops) if op.name == "amax")
        (last,) = (i for i, op in enumerate(graph.ops) if op.name == "optimizer step")
        place = steps.index(Compute(last))
        once_more = [Compute(again), Discard(graph.ops[again].writes[0])]
        schedule = Schedule(steps=(*steps[:place], *once_more, *steps[place:]))
        trace = simulate(graph, problem.platform, schedule)
        if trace.violation is not None:
            return Proposal(status=Status.UNKNOWN, message=str(trace.violation))
        return Proposal(status=Status.FEASIBLE, schedule=schedule)


def test_a_named_budget_works_when_a_solver_finds_another_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizers = made(Scaled, adamw)
    # Nobody looks for a better one.
    how: dict[str, Any] = {"optimizer": optimizers, "costs": "estimated", "gap": 1.0}
    x = batch()[:8].clone()
    with pytest.raises(remat.BudgetError) as caught:
        remat.plan(model, (x,), budget=1, **how)
    budget = caught.value.required_bytes
    monkeypatch.setattr(registry, "AUTO", (ComputesOnceMore,))
    plan = remat.plan(model, (x,), budget=budget, **how)
    assert plan.solver == "smallest_budget"
    assert plan.peak_bytes <= budget


class ReturnsWeight(nn.Module):
    """Returns a view of a weight, from which a gradient comes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(self.first(x).tanh()), self.first.weight.t()


def test_gradients_of_returned_weights_are_added() -> None:
    def train(budget: str | None) -> nn.Module:
        model, optimizers = made(ReturnsWeight, momentum)
        if budget is not None:
            remat.fit(model, (batch(),), budget=budget, optimizer=optimizers)
        for _ in range(2):
            outputs, weight = model(batch())
            (outputs.square().mean() + weight.square().sum()).backward()
        return model

    expected = train(None).state_dict()
    found = train("100%").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_parameter_that_changes_before_it_is_read_again_is_told(
    *, is_read_again: bool
) -> None:
    """Hooks of the nodes that accumulate are not seen, unless what they change is."""
    model = ReadsEarly() if is_read_again else ReturnsWeight()
    nodes: list[Any] = []
    for parameter in model.parameters():
        node: Any = parameter.view_as(parameter).grad_fn
        nodes.append(node.next_functions[0][0])

        def step(*_: object, parameter: nn.Parameter = parameter) -> None:
            with torch.no_grad():
                parameter.mul_(0.5)

        nodes[-1].register_hook(step)

    def loss(outputs: Any) -> torch.Tensor:
        return outputs if is_read_again else outputs[0].square().mean()

    how: dict[str, Any] = {"accumulate": True, "loss": loss, "costs": "estimated"}
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, (batch(),), budget=1, **how)
    remat.fit(model, (batch(),), budget=caught.value.required_bytes, **how)
    loss(model(batch())).backward()
    refused = pytest.raises(ExecutionError, match="changed in the middle of a backward")
    with refused if is_read_again else contextlib.nullcontext():
        loss(model(batch())).backward()


@pytest.mark.parametrize("regions", ["auto", "blocks"])
def test_what_hooks_of_tensors_change_is_not_read_again(regions: str) -> None:
    """Nobody sees what they change through ``data``, as LOMO does."""

    def train(*, is_fitted: bool) -> nn.Module:
        torch.manual_seed(0)
        model = ReadsEarly()

        def step(*_: object) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.1)
                    parameter.grad.zero_()

        for parameter in model.parameters():
            parameter.register_hook(step)
        if is_fitted:
            given: dict[str, Any] = {"accumulate": True, "costs": "estimated"}
            given |= {"loss": lambda outputs: outputs, "regions": regions}
            with pytest.raises(remat.BudgetError) as caught:
                remat.fit(model, (batch(),), budget=1, **given)
            remat.fit(model, (batch(),), budget=caught.value.required_bytes, **given)
        for _ in range(3):
            model(batch()).backward()
            step()
        return model

    expected = train(is_fitted=False).state_dict()
    found = train(is_fitted=True).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_gradients_wait_no_longer_than_they_have_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of schedules in which none leaves too early a small one is looked for."""

    def named_bytes() -> int:
        model, optimizers = made(Borrows, adamw)
        given: dict[str, Any] = {"optimizer": optimizers, "costs": "estimated"}
        with pytest.raises(remat.BudgetError) as caught:
            remat.fit(model, (batch(),), budget=1, **given)
        least_bytes = caught.value.required_bytes
        remat.fit(model, (batch(),), budget=least_bytes, **given)
        assert max(peaks_bytes(model, optimizers, batch())) <= least_bytes
        return least_bytes

    found_bytes = named_bytes()
    monkeypatch.setattr(step_planning, "_BISECTIONS", 0)
    assert found_bytes < 0.95 * named_bytes()


def test_verify_compares_the_parameters() -> None:
    model, optimizers = made(Stack, adamw)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = remat.verify(
        model, (batch(),), budget="80%", optimizer=optimizers, repeats=1
    )
    assert report.is_exact
    assert report.is_within_budget
    assert abs(report.prediction_error) < 0.01
    assert "the steps of all parameters" in str(report)
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert not any(optimizer.state for optimizer in optimizers.values())


def test_memory_is_that_of_each_by_itself() -> None:
    model = nn.Sequential(nn.Linear(100, 10), nn.Linear(10, 100))
    memory = optimizer_memory(OptimizersInBackward(stepped(model)))
    weights, biases = 2 * 1000, 110
    assert memory.state_bytes == 2 * 4 * (weights + biases) + 4 * 4
    assert memory.step_bytes == 0
    steps = dict(memory.in_backward)
    assert set(steps) == {(p.shape, p.dtype) for p in model.parameters()}
    assert all(size >= shape.numel() * 4 for (shape, _), size in steps.items())


def test_a_plan_of_the_other_kind_is_refused() -> None:
    model, optimizers = made(Stack, adamw)
    x = batch()
    plan = remat.plan(model, (x,), budget="100%", optimizer=optimizers)
    with pytest.raises(
        remat.PlanMismatchError, match="give the optimizer that the plan"
    ):
        remat.fit(model, (x,), plan=plan)


def test_plans_need_no_hooks_and_no_memory() -> None:
    with torch.device("meta"):
        model = Stack()
        x = torch.empty(768, WIDTH)
    optimizers = {parameter: adamw(parameter) for parameter in model.parameters()}
    plan = remat.plan(
        model, (x,), budget="100%", optimizer=optimizers, costs="estimated"
    )
    assert any(op.name == STEPPING for op in plan.graph.ops)


def test_a_gradient_that_stays_is_told() -> None:
    model, optimizers = made(Stack, adamw)
    x = batch()
    remat.fit(model, (x,), budget="100%", optimizer=optimizers)
    for optimizer in optimizers.values():
        vars(optimizer)["zero_grad"] = lambda: None
    model(x).backward()
    with pytest.warns(PlanWarning, match="is still there"):
        model(x)


def test_hooks_that_are_gone_are_told() -> None:
    model, optimizers = made(Stack, adamw)
    x = batch()
    remat.fit(model, (x,), budget="100%", optimizer=optimizers)
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks.clear()
    with pytest.warns(PlanWarning, match="such hooks are gone"):
        model(x).backward()


def test_two_passes_before_a_backward_pass_are_told_with_a_cure_that_is_possible() -> (
    None
):
    model, optimizers = made(Stack, adamw)
    x = batch()
    remat.fit(model, (x,), budget="80%", optimizer=optimizers)
    with pytest.warns(PlanWarning, match="2 forward passes") as caught:
        (model(x) + model(x)).backward()
    (words,) = (str(w.message) for w in caught if "2 forward" in str(w.message))
    assert "Put the calls into one module" in words
    assert "in_flight=2" not in words


def test_bad_optimizers_are_refused_at_the_door() -> None:
    model, optimizers = made(Stack, adamw)
    x = batch()

    def fit(optimizer: Any, **options: Any) -> None:
        remat.fit(model, (x,), budget="80%", optimizer=optimizer, **options)

    first = next(iter(optimizers))
    with pytest.raises(ValueError, match="empty mapping"):
        fit({})
    with pytest.raises(TypeError, match="a str where a parameter is needed"):
        fit({"weight": optimizers[first]})
    with pytest.raises(TypeError, match="a str where an optimizer is needed"):
        fit({first: "adamw"})
    with pytest.raises(ValueError, match="steps 2 parameters, or another one"):
        fit({first: AdamW([first, nn.Parameter(torch.ones(1))])})
    with pytest.raises(ValueError, match=r"no optimizer for 'blocks.0.0.bias' and"):
        fit({first: optimizers[first]})
    with pytest.raises(ValueError, match="leave no gradients to add to"):
        fit(optimizers, accumulate=True)
    first_layer, second_layer = nn.Linear(4, 4), nn.Linear(4, 4)
    second_layer.weight = nn.Parameter(first_layer.weight.data)
    twins = nn.Sequential(first_layer, second_layer)
    with pytest.raises(ValueError, match="are in the same memory"):
        remat.fit(twins, (x,), budget="80%", optimizer=stepped(twins))
    with pytest.raises(ValueError, match="leave in_flight out"):
        fit(optimizers, in_flight=2)
    plain = Stack()
    mine = {parameter: adamw(parameter) for parameter in plain.parameters()}
    with pytest.raises(ValueError, match="has no hook that steps its own"):
        remat.fit(plain, (x,), budget="80%", optimizer=mine)
