"""Files of published graphs become training graphs that can be planned."""

import json
from pathlib import Path

import pytest

from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.core.errors import FileFormatError
from remat.core.graph import Phase
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.testing.instances.published import read_published, with_backward

# The layout of both formats, with numbers of our own.
NODES = {
    "graph": {"name": "tiny"},
    "nodes": [
        {"id": 0, "name": "a", "backward": False, "cost_cpu": 5, "cost_ram": 100},
        {"id": 1, "name": "b", "backward": False, "cost_cpu": 7, "cost_ram": 50},
        {"id": 2, "name": "b'", "backward": True, "cost_cpu": 7, "cost_ram": 50},
        {"id": 3, "name": "a'", "backward": True, "cost_cpu": 9, "cost_ram": 10},
    ],
    "links": [
        {"source": 0, "target": 1},
        {"source": 1, "target": 2},
        {"source": 0, "target": 3},
        {"source": 2, "target": 3},
    ],
}

CHAINER = """\
4 3
0 8 /W
1 100 x
2 60 _
3 40 _
forward
2 1
1 data
0 data
2
Convolution2DFunction
stride 1
forward
1 1
2 data
3
ReLU
_
backward
1 1
3 grad
2
ReLU
_
"""


def test_node_link_files_are_training_graphs(tmp_path: Path) -> None:
    file = tmp_path / "tiny_train.json"
    file.write_text(json.dumps(NODES), encoding="utf-8")
    graph = read_published(file)
    assert graph.name == "tiny"
    assert [op.cost_ns for op in graph.ops] == [(5,), (7,), (7,), (9,)]
    assert [op.phase for op in graph.ops] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
    assert [storage.size_bytes for storage in graph.storages] == [100, 50, 50]
    assert graph.ops[3].reads == (0, 2)
    # Nobody reads what the last op makes.
    assert graph.ops[3].workspace_bytes == (10,)
    assert plain_peak_bytes(graph) == 100 + 50 + 50


def test_forward_graphs_get_a_backward_pass(tmp_path: Path) -> None:
    file = tmp_path / "cg_tiny.txt"
    file.write_text(CHAINER, encoding="utf-8")
    graph = read_published(file)
    assert graph.name == "tiny"
    assert [(op.cost_ns, op.reads, op.writes) for op in graph.ops] == [
        ((10,), (), (0,)),
        ((1,), (0,), (1,)),
        ((10,), (0, 1, 3), (2,)),
    ]
    assert [storage.size_bytes for storage in graph.storages] == [60, 40, 60, 40]
    assert (graph.forward_outputs, graph.tangents) == ((1,), (3,))


def test_a_gradient_waits_for_all_readers() -> None:
    # 0 is read by 1 and by 2, and 2 is read by 1: the order is not that of numbers.
    forward = ForwardGraph.of_values([4, 2, 1], [3, 2, 1], [(0, 1), (0, 2), (2, 1)])
    graph = with_backward(forward)
    assert [op.writes for op in graph.ops] == [(0,), (2,), (1,), (5,), (3,)]
    assert graph.ops[-1].reads == (0, 1, 2, 4, 5)
    assert plan_graph(graph, budget="100%").recomputed_op_count == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no graph",
        "{}",
        '{"nodes": [], "links": [], "graph": {}}',
        "2 1\n0 8 x\n",
        json.dumps(NODES).replace('"cost_cpu": 9', '"cost_cpu": 9.5'),
    ],
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"file: no graph of Moccasin"):
        read_published(file)
    with pytest.raises(FileFormatError, match="absent"):
        read_published(tmp_path / "absent")
