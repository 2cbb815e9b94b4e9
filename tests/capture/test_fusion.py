"""Groups of operators, and graphs in which kernels take their place."""

import operator
import random
from typing import Any

import pytest
import torch
from torch import fx

from remat.capture import kernel_recomputation
from remat.capture.fused_kernel import FusedKernel
from remat.capture.fused_kernels import fuse, fusion_candidates, recomputed_outside
from remat.capture.fusion_groups import computed_by, fusion_groups, is_operator
from remat.capture.kernel_recomputation import (
    original_of,
    read_instead,
    recompute_in_backward,
)

aten = torch.ops.aten
SIDE = 4


class Drawing:
    """A random graph of square matrices: elementwise ops, views, products, norms."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.graph = fx.Graph()
        self.values: list[fx.Node] = []
        for position in range(3):
            self.take(self.graph.placeholder(f"input_{position}"))
        count = self.draw.randrange(8, 40)
        half = self.draw.randrange(2, count)
        for position in range(count):
            self.tag = "is_backward" if position >= half else "is_forward"
            self.add()
        returned = self.draw.sample(self.values[3:], 3)
        self.graph.output(tuple(dict.fromkeys([*returned, self.values[-1]])))
        self.module = fx.GraphModule(torch.nn.Module(), self.graph)

    tag = "is_forward"

    def take(self, node: fx.Node, value: torch.Tensor | None = None) -> None:
        node.meta["val"] = torch.empty(SIDE, SIDE) if value is None else value
        node.meta["partitioner_tag"] = self.tag
        self.values.append(node)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["partitioner_tag"] = self.tag
        return node

    def pick(self) -> fx.Node:
        # Mostly recent ones, so that there are chains; sometimes any.
        recent = self.values[-4:] if self.draw.random() < 0.7 else self.values
        return self.draw.choice(recent)

    def add(self) -> None:
        match self.draw.randrange(7):
            case 0:
                self.take(self.call(aten.mm.default, self.pick(), self.pick()))
            case 1:
                self.take(self.call(aten.t.default, self.pick()))
            case 2:
                norm = self.call(
                    aten.native_layer_norm.default,
                    self.pick(),
                    [SIDE],
                    None,
                    None,
                    1e-5,
                )
                norm.meta["val"] = (
                    torch.empty(SIDE, SIDE),
                    torch.empty(SIDE, 1),
                    torch.empty(SIDE, 1),
                )
                self.take(self.call(operator.getitem, norm, 0))
            case 3:
                self.take(self.call(aten.tanh.default, self.pick()))
            case 4:
                split = self.call(aten.split.Tensor, self.pick(), SIDE // 2)
                split.meta["val"] = [torch.empty(SIDE // 2, SIDE)] * 2
                halves = [self.call(operator.getitem, split, i) for i in (0, 1)]
                for half in halves:
                    half.meta["val"] = torch.empty(SIDE // 2, SIDE)
                self.take(self.call(aten.cat.default, halves))
            case _:
                target = self.draw.choice([aten.add.Tensor, aten.mul.Tensor])
                self.take(self.call(target, self.pick(), self.pick()))


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIDE, SIDE, generator=generator) for _ in range(3)]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run their operators one by one."""
    monkeypatch.setattr(FusedKernel, "__call__", lambda self, *x: self.module(*x))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("seed", range(60))
def test_fused_graphs_compute_what_they_did(seed: int) -> None:
    module = Drawing(seed).module
    expected = module(*inputs())
    candidates = fusion_candidates(module)
    chosen = [c for c in candidates if random.Random(seed).random() < 0.8]
    before = sum(is_operator(node) for node in module.graph.nodes)
    fuse(module, chosen)
    module.graph.lint()
    for left, right in zip(expected, module(*inputs()), strict=True):
        assert torch.equal(left, right)
    after = sum(is_operator(node) for node in module.graph.nodes)
    saved = sum(len(c.members) - 1 for c in chosen)
    assert after == before - saved


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("seed", range(60))
def test_backward_may_compute_again_what_kernels_read(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Drawing(seed).module
    expected = module(*inputs())
    names = {node.name for node in module.graph.nodes}
    monkeypatch.setattr(kernel_recomputation, "_recomputed_names", lambda *_: names)
    recompute_in_backward(module, 1)
    again = [n for n in module.graph.nodes if original_of(n) is not None]
    for node in again:
        assert node.meta["partitioner_tag"] == "is_backward"
        original = original_of(node)
        assert original is not None
        assert original.meta["partitioner_tag"] == "is_forward"
    chosen = fusion_candidates(module)
    if seed % 2:
        chosen = [c for c in chosen if random.Random(seed).random() < 0.5]
    # As often as it takes: what is read instead may have been in a kernel.
    while outside := recomputed_outside(module, chosen):
        read_instead(module, outside)
        kept = {c.members[0] for c in chosen}
        chosen = [c for c in fusion_candidates(module) if c.members[0] in kept]
    fuse(module, chosen)
    module.graph.lint()
    for left, right in zip(expected, module(*inputs()), strict=True):
        assert torch.equal(left, right)


def test_some_random_graphs_compute_something_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    for seed in range(60):
        module = Drawing(seed).module
        names = {node.name for node in module.graph.nodes}
        monkeypatch.setattr(
            kernel_recomputation, "_recomputed_names", lambda *_, x=names: x
        )
        recompute_in_backward(module, 1)
        counts.append(sum(original_of(n) is not None for n in module.graph.nodes))
    assert sum(count > 0 for count in counts) > 15


def test_many_random_graphs_have_groups() -> None:
    counts = [len(fusion_groups(Drawing(seed).graph)) for seed in range(60)]
    assert sum(count > 1 for count in counts) > 30


@pytest.mark.parametrize("seed", range(60))
def test_groups_wait_for_each_other_in_no_circle(seed: int) -> None:
    graph = Drawing(seed).graph
    group_of = {
        node: f"group {i}"
        for i, group in enumerate(fusion_groups(graph))
        for node in group
    }
    reads: dict[object, set[object]] = {}
    for node in graph.nodes:
        if is_operator(node):
            own = group_of.get(node, node)
            sources = {computed_by(s) for s in node.all_input_nodes}
            reads.setdefault(own, set()).update(group_of.get(s, s) for s in sources)
            reads[own].discard(own)
    while reads:
        ready = [unit for unit in reads if not reads[unit] & reads.keys()]
        assert ready, "units wait for each other"
        for unit in ready:
            del reads[unit]


def test_an_operator_between_two_keeps_them_apart() -> None:
    # a -> product -> b with a -> b as well: together they would wait for the product.
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.tanh.default, (x,))
    product = graph.call_function(aten.mm.default, (a, a))
    b = graph.call_function(aten.add.Tensor, (product, a))
    graph.output((b,))
    for node in (x, a, product, b):
        node.meta = {"val": torch.empty(2, 2), "partitioner_tag": "is_backward"}
    assert fusion_groups(graph) == []


def test_the_two_passes_are_never_in_one_group() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.tanh.default, (x,))
    b = graph.call_function(aten.exp.default, (a,))
    graph.output((b,))
    for node, tag in ((x, "is_forward"), (a, "is_forward"), (b, "is_backward")):
        node.meta = {"val": torch.empty(2, 2), "partitioner_tag": tag}
    assert fusion_groups(graph) == []


def test_equal_groups_share_a_kernel() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    value, nodes = x, [x]
    for _ in range(2):
        a = graph.call_function(aten.tanh.default, (value,))
        b = graph.call_function(aten.exp.default, (a,))
        value = graph.call_function(aten.mm.default, (b, b))
        nodes += [a, b, value]
    graph.output((value,))
    for node in nodes:
        node.meta = {"val": torch.empty(2, 2), "partitioner_tag": "is_backward"}
    candidates = fusion_candidates(fx.GraphModule(torch.nn.Module(), graph))
    assert len(candidates) == 2
    assert candidates[0].kernel is candidates[1].kernel


def test_what_the_caller_holds_runs_alone() -> None:
    # Its operator runs once, and so would everything that is fused with it.
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.tanh.default, (x,))
    b = graph.call_function(aten.exp.default, (a,))
    graph.output((b,))
    for node in (x, a, b):
        node.meta = {"val": torch.empty(2, 2), "partitioner_tag": "is_forward"}
    assert fusion_groups(graph) == []


def test_a_view_of_a_number_is_computed_by_nothing_else() -> None:
    graph = fx.Graph()
    view = graph.call_function(aten._conj.default, (1j,))
    assert computed_by(view) is view


def test_complex_numbers_and_random_ones_are_not_fused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.tanh.default, (x,))
    b = graph.call_function(aten.bernoulli.p, (a, 0.5))
    c = graph.call_function(aten.exp.default, (b,))
    d = graph.call_function(aten.mul.Tensor, (c, 1j))
    e = graph.call_function(aten.exp.default, (d,))
    graph.output((e,))
    for node in (x, a, b, c, d, e):
        dtype = torch.complex64 if node in (d, e) else torch.float32
        value = torch.empty(2, 2, dtype=dtype)
        node.meta = {"val": value, "partitioner_tag": "is_backward"}
    assert fusion_groups(graph) == []
