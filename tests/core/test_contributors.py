"""What is live at the peak, named by layer."""

import pytest

from remat.core.contributors import (
    contributors,
    labelled,
    largest,
    layer_of,
    operator_in,
)
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.schedule import Compute


def graph_of(
    outputs: list[tuple[str, int]], residents: list[Storage] | None = None
) -> TrainingGraph:
    """Return a graph of forward ops, one per output, all read by one backward op."""
    given = residents or []
    storages = [
        *given,
        *(Storage(name=name, size_bytes=size) for name, size in outputs),
        Storage(name="tangent", size_bytes=0, role=Role.TANGENT),
        Storage(name="gradient of h.3.weight", size_bytes=7, role=Role.GRADIENT),
    ]
    made = range(len(given), len(given) + len(outputs))
    tangent, gradient = len(storages) - 2, len(storages) - 1
    forward = [
        Op(
            name=layer_of(storages[s].name)[1],
            reads=(),
            writes=(s,),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
        )
        for s in made
    ]
    backward = Op(
        name="mm_9",
        reads=(*made, tangent),
        writes=(gradient,),
        cost_ns=(1,),
        workspace_bytes=(5,),
        phase=Phase.BACKWARD,
    )
    return TrainingGraph(
        name="test",
        storages=tuple(storages),
        ops=(*forward, backward),
        forward_outputs=(made[-1],),
        tangents=(tangent,),
        final_outputs=(gradient,),
        device_kinds=("cpu",),
    )


def at_the_end(graph: TrainingGraph) -> dict[str, int]:
    schedule = schedule_from_order(graph, store_all_order(graph))
    last = schedule.steps.index(Compute(op=len(graph.ops) - 1, device=0))
    parts = contributors(graph, schedule, last)
    assert parts == sorted(parts, key=lambda part: (-part[1], part[0]))
    return dict(parts)


def test_blocks_that_are_alike_in_numbered_layers_are_one_entry() -> None:
    layers = [0, 1, 2, 3, 7, 9, 10]
    outputs = [(f"h.{n}.up (addmm_{n})", 10) for n in layers]
    outputs += [("h.4.up (addmm_99)", 11), ("h.4.down (addmm)", 10), ("mul_3", 2)]
    outputs += [("mul_4", 1), ("h.4.up (gelu_1)", 3), ("norm.1.2 (bn.0)", 4)]
    found = at_the_end(graph_of([*outputs, ("norm.3.2 (bn_4.0)", 4)]))
    assert found == {
        "activation h.{0-3,7,9-10}.up (addmm) x 7": 70,
        "activation h.4.up (addmm)": 11,
        "activation h.4.down (addmm)": 10,
        "activation norm.{1,3}.2 (bn) x 2": 8,
        "gradient of h.3.weight": 7,
        "workspace of mm_9": 5,
        "activation h.4.up (gelu)": 3,
        "activation mul x 2": 3,
    }


def test_what_is_resident_has_the_models_names() -> None:
    residents = [
        Storage(name=name, size_bytes=size, role=role, is_resident=True)
        for name, size, role in (
            ("h.0.weight", 20, Role.PARAMETER),
            ("h.1.weight", 20, Role.PARAMETER),
            ("head.weight", 90, Role.PARAMETER),
            ("args[0]", 6, Role.INPUT),
            ("optimizer state outside the graph", 40, Role.OPTIMIZER_STATE),
        )
    ]
    found = at_the_end(graph_of([("mul", 1)], residents))
    assert found == {
        "parameter head.weight": 90,
        "parameter h.{0-1}.weight x 2": 40,
        "optimizer state outside the graph": 40,
        "gradient of h.3.weight": 7,
        "input args[0]": 6,
        "workspace of mm_9": 5,
        "activation mul": 1,
    }


def test_workspace_is_that_of_the_layer() -> None:
    graph = graph_of([("h.0.attention (softmax_2)", 3)])
    schedule = schedule_from_order(graph, store_all_order(graph))
    (name, size), *_ = contributors(graph, schedule, 0)
    assert (name, size) == ("activation h.0.attention (softmax)", 3)
    op = graph.ops[0]
    graph = TrainingGraph(
        name="test",
        storages=graph.storages,
        ops=(
            Op(
                name=op.name,
                reads=op.reads,
                writes=op.writes,
                cost_ns=(1,),
                workspace_bytes=(8,),
                phase=op.phase,
            ),
            *graph.ops[1:],
        ),
        forward_outputs=graph.forward_outputs,
        tangents=graph.tangents,
        final_outputs=graph.final_outputs,
        device_kinds=graph.device_kinds,
    )
    (name, size), *_ = contributors(graph, schedule, 0)
    assert (name, size) == ("workspace of h.0.attention (softmax_2)", 8)


@pytest.mark.parametrize(
    ("layer", "made"),
    [("a.0.b", "addmm_3"), ("", "native_dropout.1"), ("a.b backward", "bn_2.0")],
)
def test_a_label_is_read_as_it_was_written(layer: str, made: str) -> None:
    assert layer_of(labelled(layer, made)) == (layer, made)


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("h.1 (convolution_1_2.0)", "convolution"),
        ("native_layer_norm_1_2", "native_layer_norm"),
        ("upsample_bilinear2d", "upsample_bilinear2d"),
        ("_12", "_12"),
    ],
)
def test_operator_is_the_name_without_numbers(name: str, operator: str) -> None:
    assert operator_in(name) == operator


def test_the_last_entry_is_not_hidden_behind_a_word() -> None:
    parts = [("a", 3), ("b", 2), ("c", 1)]
    assert largest(parts, 2) == parts
    assert largest(parts, 1) == [("a", 3), ("others (2)", 3)]
    assert sum(size for _, size in largest(parts, 0)) == 6
