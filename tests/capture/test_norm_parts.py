"""Batch norm in two parts: what they compute, and graphs that are made of them."""

import operator
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from remat.capture.fused_kernel import FusedKernel
from remat.capture.fused_kernels import (
    bundled,
    fuse,
    fusion_candidates,
    norms_outside,
)
from remat.capture.fusion_groups import fusion_groups, is_fusible
from remat.capture.norm_parts import (
    BATCH_NORM,
    PARTS,
    _in_chunks,
    batch_norms,
    batch_statistics,
    can_be_split,
    join_norms,
    norm_gradients,
    norm_of,
    normalised,
    split_norms,
    whole_arguments,
)

aten = torch.ops.aten


def drawn(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.double
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


LAYOUTS = [
    pytest.param(last(drawn(4, 8, 6, 6)), True, id="channels last"),
    pytest.param(drawn(4, 8, 6, 6), False, id="channels first"),
    pytest.param(last(drawn(2, 8, 37, 1)), False, id="rows without a divisor"),
    pytest.param(last(drawn(1, 8, 4, 4)), True, id="two chunks"),
    pytest.param(last(drawn(1, 8, 5, 5))[:, ::2], False, id="strided"),
    pytest.param(drawn(40, 8), False, id="one number per channel and row"),
    pytest.param(drawn(4, 8, 10), False, id="sequences"),
    pytest.param(
        drawn(2, 4, 3, 4, 4).to(memory_format=torch.channels_last_3d),
        True,
        id="volumes",
    ),
]


@pytest.mark.parametrize(("x", "is_in_chunks"), LAYOUTS)
def test_statistics_are_those_of_each_channel(
    x: torch.Tensor, is_in_chunks: bool
) -> None:
    chunks = _in_chunks(x)
    assert (chunks is not None) == is_in_chunks
    assert chunks is None or len(chunks) > 1
    mean, variance = batch_statistics(3 * x + 5)
    rows = (3 * x + 5).movedim(1, -1).reshape(-1, x.shape[1])
    torch.testing.assert_close(mean, rows.mean(0))
    torch.testing.assert_close(variance, rows.var(0, correction=0))


def test_chunks_hold_every_row_once() -> None:
    x = last(drawn(4, 8, 6, 6))
    chunks = _in_chunks(x)
    assert chunks is not None
    assert 7 <= chunks.shape[1] <= 32
    assert torch.equal(chunks.flatten(0, 1), x.movedim(1, -1).reshape(-1, 8))


@pytest.mark.parametrize("x", [pytest.param(p.values[0], id=p.id) for p in LAYOUTS])
@pytest.mark.parametrize("weight", [None, drawn(8, seed=3)], ids=["plain", "weighted"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("is_needed", [[True] * 3, [False, True, True]])
def test_gradients_are_those_of_the_operator(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    is_training: bool,
    is_needed: list[bool],
) -> None:
    channels = x.shape[1]
    weight = None if weight is None else weight[:channels]
    gradient = torch.empty_like(x).copy_(drawn(*x.shape, seed=1))
    mean, variance = batch_statistics(x)
    saved = (mean, (variance + 1e-5).rsqrt())
    running = (drawn(channels, seed=4), drawn(channels, seed=5).abs())
    arguments = (gradient, x, weight, *running, *saved, is_training, 1e-5, is_needed)
    expected = aten.native_batch_norm_backward.default(*arguments)
    for left, right in zip(norm_gradients(*arguments), expected, strict=True):
        if left is None:
            # The operator leaves out what is not needed, or makes nothing of it.
            assert right is None or not right.numel() or not is_needed[0]
        else:
            torch.testing.assert_close(left, right)


class Sketch:
    """A graph in the making, with the values that it has."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.running: list[fx.Node] = []

    def give(self, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta = {"val": value, "partitioner_tag": "is_forward"}
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta = {"val": target(*values), "partitioner_tag": "is_forward"}
        return node

    def convolution(self, x: fx.Node) -> fx.Node:
        weight = self.give(last(drawn(4, x.meta["val"].shape[1], 1, 1)))
        options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return self.call(aten.convolution.default, x, weight, None, *options)

    def norm(self, x: fx.Node) -> list[fx.Node]:
        """Return what a batch norm returns, but for its new running statistics."""
        count = x.meta["val"].shape[1]
        given = [self.give(drawn(count, seed=i).abs() + 0.5) for i in range(4)]
        norm = self.call(BATCH_NORM, x, *given, True, 0.1, 1e-5)
        results = [self.call(operator.getitem, norm, i) for i in range(5)]
        self.running += results[3:]
        return results[:3]

    def finish(self, returned: Sequence[fx.Node]) -> fx.GraphModule:
        self.graph.output((*returned, *self.running))
        # Placeholders come first, whenever they were thought of.
        last_one = self.graph._root
        for node in self.graph.find_nodes(op="placeholder"):
            last_one.append(node)
            last_one = node
        self.module = fx.GraphModule(torch.nn.Module(), self.graph)
        self.given = [n.meta["val"] for n in self.graph.find_nodes(op="placeholder")]
        return self.module


class Drawing(Sketch):
    """A random graph of images: norms, concatenations, products, elementwise ops."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.values = [self.give(last(drawn(3, 4, 4, 4, seed=i))) for i in range(2)]
        for _ in range(self.draw.randrange(6, 25)):
            self.add()
        returned = self.draw.sample(self.values[2:], min(3, len(self.values) - 2))
        if seed % 3:  # What is returned is in no kernel, and nothing is in vain.
            returned += [value for value in self.values if not value.users]
            returned = [self.call(aten.neg.default, value) for value in returned]
            self.values.append(returned[-1])
        self.finish([*returned, self.values[-1]])

    def add_norm(self, x: fx.Node) -> None:
        y, mean, inverse = self.norm(x)
        self.values.append(y)
        if self.draw.random() < 0.5:  # As backward reads what was saved.
            shape = [1, x.meta["val"].shape[1], 1, 1]
            shifted = self.call(aten.view.default, mean, shape)
            scaled = self.call(aten.view.default, inverse, shape)
            both = self.call(aten.mul.Tensor, y, scaled)
            self.values.append(self.call(aten.add.Tensor, both, shifted))

    def add(self) -> None:
        x = self.draw.choice(self.values[-3:])
        channels = x.meta["val"].shape[1]
        match self.draw.randrange(6):
            case 0 | 1 | 2:
                self.add_norm(x)
            case 3:
                self.values.append(self.convolution(x))
            case 4 if channels < 20:
                other = self.draw.choice(self.values)
                self.values.append(self.call(aten.cat.default, [x, other], 1))
            case _:
                self.values.append(self.call(aten.tanh.default, x))


def split_all(module: fx.GraphModule) -> list[int]:
    numbers = [
        i
        for i, norm in enumerate(batch_norms(module.graph))
        if is_fusible(norm) and can_be_split(module, norm)
    ]
    split_norms(module, numbers)
    module.graph.lint()
    module.recompile()
    return numbers


def close(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seed", range(30))
def test_split_graphs_compute_the_same_and_can_be_joined(seed: int) -> None:
    drawing = Drawing(seed)
    module = drawing.module
    before = [(n.op, n.target) for n in module.graph.nodes]
    expected = module(*drawing.given)
    numbers = split_all(module)
    left = [n for n in module.graph.nodes if n.target is BATCH_NORM]
    seconds = module.graph.find_nodes(op="call_function", target=normalised)
    assert len(seconds) == len(numbers)
    assert len(left) + len(seconds) == sum(t is BATCH_NORM for _, t in before)
    close(expected, module(*drawing.given))
    join_norms(module)
    module.recompile()
    # Which of two equal statistics is read may differ.
    assert [t for _, t in before if t is not operator.getitem] == [
        n.target for n in module.graph.nodes if n.target is not operator.getitem
    ]
    assert not [n for n in module.graph.nodes if norm_of(n) is not None]
    for a, b in zip(expected, module(*drawing.given), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run their operators one by one."""
    monkeypatch.setattr(FusedKernel, "__call__", lambda self, *x: self.module(*x))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("seed", range(30))
def test_kernels_of_parts_compute_the_same(seed: int) -> None:
    drawing = Drawing(seed)
    module = drawing.module
    expected = module(*drawing.given)
    numbers = split_all(module)
    whole: set[int] = set()
    # Of a value that is returned, the second part is in no kernel.
    while outside := norms_outside(module, candidates := fusion_candidates(module)):
        whole |= outside
        join_norms(module)
        split_norms(module, [i for i in numbers if i not in whole])
    fuse(module, candidates)
    module.graph.lint()
    assert not [n for n in module.graph.nodes if n.target in PARTS]
    close(expected, module(*drawing.given))


def test_most_random_graphs_are_split_and_put_into_kernels() -> None:
    sizes: list[int] = []
    for seed in range(30):
        module = Drawing(seed).module
        numbers = split_all(module)
        if not norms_outside(module, fusion_candidates(module)):
            sizes.append(len(numbers))
    assert sum(size > 1 for size in sizes) > 10


@pytest.mark.parametrize("seed", range(30))
def test_no_group_holds_a_second_part_and_its_statistics(seed: int) -> None:
    module = Drawing(seed).module
    split_all(module)
    group_of = {n: i for i, g in enumerate(fusion_groups(module.graph)) for n in g}
    for second in module.graph.find_nodes(op="call_function", target=normalised):
        number = norm_of(second)
        own = [
            n
            for n in module.graph.nodes
            if norm_of(n) == number and n.target in PARTS and n is not second
        ]
        for node in own:
            assert second not in group_of or group_of[second] != group_of.get(node, -1)


def dense_network(layers: int) -> fx.GraphModule:
    """A network that appends channels, and normalises all of them, again and again."""
    sketch = Sketch()
    x = sketch.give(last(drawn(3, 4, 4, 4)))
    for _ in range(layers):
        new = sketch.convolution(sketch.norm(x)[0])
        new = sketch.call(aten.tanh.default, new)
        x = sketch.call(aten.cat.default, [x, new], 1)
    y = sketch.call(aten.tanh.default, sketch.norm(x)[0])
    return sketch.finish([sketch.convolution(y)])


def test_channels_are_reduced_once_and_not_once_per_layer() -> None:
    module = dense_network(5)
    split_all(module)
    graph = module.graph
    reduced = graph.find_nodes(op="call_function", target=batch_statistics)
    assert len(reduced) == 6
    assert {node.args[0].meta["val"].shape[1] for node in reduced} == {4}


def test_concatenations_are_in_the_kernel_that_can_run_again() -> None:
    module = dense_network(5)
    split_all(module)
    groups = fusion_groups(module.graph)
    for group in groups:
        targets = {node.target for node in group}
        images = [
            n
            for n in group
            if n.target is aten.cat.default and n.meta["val"].dim() == 4
        ]
        if batch_statistics in targets:
            assert not images
        if images:
            assert normalised in targets


def test_two_norms_of_one_value_reduce_it_once() -> None:
    sketch = Sketch()
    x = sketch.give(last(drawn(3, 4, 4, 4)))
    module = sketch.finish([*sketch.norm(x), *sketch.norm(x)])
    expected = module(*sketch.given)
    split_all(module)
    reduced = module.graph.find_nodes(op="call_function", target=batch_statistics)
    assert len(reduced) == 1
    close(expected, module(*sketch.given))
    join_norms(module)
    module.recompile()
    for a, b in zip(expected, module(*sketch.given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("others", "dim"),
    [
        pytest.param([last(drawn(3, 4, 4, 4))], 0, id="images"),
        pytest.param([last(drawn(3, 4, 4, 4))], 2, id="rows"),
        pytest.param([last(drawn(3, 2, 4, 4)).float()], 1, id="mixed types"),
        pytest.param([torch.empty(0, dtype=torch.double)], 1, id="nothing"),
    ],
)
def test_other_concatenations_are_reduced_whole(
    others: list[torch.Tensor], dim: int
) -> None:
    sketch = Sketch()
    pieces = [sketch.give(last(drawn(3, 4, 4, 4))), *map(sketch.give, others)]
    x = sketch.call(aten.cat.default, pieces, dim)
    assert reduced_in(sketch, x) == [x]


def test_a_dimension_counted_from_the_end_is_one_of_channels() -> None:
    sketch = Sketch()
    pieces = [sketch.give(last(drawn(3, 4, 4, 4, seed=i))) for i in range(2)]
    x = sketch.call(aten.cat.default, pieces, -3)
    assert reduced_in(sketch, x) == pieces


def reduced_in(sketch: Sketch, x: fx.Node) -> list[Any]:
    """Return what is reduced to normalise a value."""
    module = sketch.finish(sketch.norm(x))
    expected = module(*sketch.given)
    split_all(module)
    close(expected, module(*sketch.given))
    reduced = module.graph.find_nodes(op="call_function", target=batch_statistics)
    return [node.args[0] for node in reduced]


def test_parts_of_one_norm_are_bundled() -> None:
    module = dense_network(2)
    split_all(module)
    bundles = bundled(fusion_candidates(module))
    for bundle in bundles:
        numbers = {norm_of(n) for c in bundle for n in c.members} - {None}
        for other in bundles:
            if other is not bundle:
                assert not numbers & {norm_of(n) for c in other for n in c.members}
    assert max(len(bundle) for bundle in bundles) > 1


def test_kernels_sum_the_gradients_of_a_norm_in_chunks() -> None:
    sketch = Sketch()
    x, y, gradient = (sketch.give(last(drawn(3, 4, 4, 4, seed=i))) for i in range(3))
    weight, mean, inverse = (sketch.give(drawn(4, seed=i).abs()) for i in range(3))
    shut = sketch.call(aten.threshold_backward.default, gradient, y, 0)
    arguments = (shut, x, weight, None, None, mean, inverse, True, 1e-5, [True] * 3)
    norm = sketch.call(aten.native_batch_norm_backward.default, *arguments)
    sketch.graph.output(tuple(sketch.call(operator.getitem, norm, i) for i in range(3)))
    for node in sketch.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    module = fx.GraphModule(torch.nn.Module(), sketch.graph)
    (candidate,) = fusion_candidates(module)
    kernel = candidate.kernel.module
    assert kernel.graph.find_nodes(op="call_function", target=norm_gradients)
    given = [node.meta["val"] for node in candidate.inputs]
    close(
        module(*(n.meta["val"] for n in (x, y, gradient, weight, mean, inverse))),
        kernel(*given),
    )


def test_a_second_part_knows_its_norm() -> None:
    module = dense_network(1)
    norms = batch_norms(module.graph)
    expected = [tuple(norm.args) for norm in norms]
    split_all(module)
    seconds = module.graph.find_nodes(op="call_function", target=normalised)
    assert [whole_arguments(second) for second in seconds] == expected


def test_norms_of_mixed_types_stay_whole() -> None:
    sketch = Sketch()
    x = sketch.give(drawn(3, 4, 4, 4, dtype=torch.float32))
    given = [sketch.give(drawn(4, dtype=torch.float32)) for _ in range(4)]
    norm = sketch.call(BATCH_NORM, x, *given, True, 0.1, 1e-5)
    module = fx.GraphModule(torch.nn.Module(), sketch.graph)
    assert can_be_split(module, norm)
    x.meta["val"] = x.meta["val"].bfloat16()
    assert not can_be_split(module, norm)


def test_half_precision_is_left_to_what_sums_it_in_single() -> None:
    x = last(drawn(8, 4, 14, 14)).bfloat16()
    gradient = last(drawn(8, 4, 14, 14, seed=1)).bfloat16()
    saved = (x.float().mean((0, 2, 3)).bfloat16(), torch.ones(4, dtype=torch.bfloat16))
    arguments = (gradient, x, None, None, None, *saved, True, 1e-5, [True] * 3)
    expected = aten.native_batch_norm_backward.default(*arguments)
    for left, right in zip(norm_gradients(*arguments), expected, strict=True):
        assert left is not None
        assert torch.equal(left, right)

    sketch = Sketch()
    given = [sketch.give(x), *(sketch.give(saved[1]) for _ in range(4))]
    norm = sketch.call(BATCH_NORM, *given, True, 0.1, 1e-5)
    module = fx.GraphModule(torch.nn.Module(), sketch.graph)
    assert not can_be_split(module, norm)
