"""Graphs that others published, read from their files. None of their data is here.

Two formats are known. Files of Moccasin [1]_ are networkx's node-link JSON: training
graphs that the authors of Checkmate [2]_ extracted from Keras, and random layered ones.
Files ``cg_*.txt`` of the lower-set method [3]_ are computation graphs that Chainer
printed, of which the forward part is read.

References
----------
.. [1] B. Bartan et al. Moccasin: efficient tensor rematerialization for neural
   networks. ICML 2023. github.com/haoming-codes/moccasin, ``data/``.
.. [2] P. Jain et al. Checkmate: breaking the memory wall with optimal tensor
   rematerialization. MLSys 2020.
.. [3] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019. github.com/pfnet-research/recompute, ``computational_graphs/``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.core.errors import FileFormatError, RematError
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph


def read_published(file: Path) -> TrainingGraph:
    """Return the training graph of a published file, whichever of the two it is.

    Raises
    ------
    FileFormatError
        If it cannot be read, or is none of the known formats.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return _node_link(json.loads(text), file.stem)
        return with_backward(_chainer(text, file.stem))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        StopIteration,
    ) as error:
        if isinstance(error, RematError) and not isinstance(error, FileFormatError):
            error = FileFormatError(str(error))
        msg = (
            f"{file}: no graph of Moccasin (node-link JSON) nor of the lower-set method "
            f"(cg_*.txt): {type(error).__name__}: {error}"
        )
        raise FileFormatError(msg) from error


def read_node_link(file: Path) -> TrainingGraph:
    """Return a published training graph of Moccasin or Checkmate.

    Costs are taken for nanoseconds, whatever their unit: it differs from file to file.
    An op whose output nobody reads drops it at once. Parameters are not in the files.

    Raises
    ------
    ValueError
        If a cost is no integer.
    """
    return _node_link(json.loads(file.read_text(encoding="utf-8")), file.stem)


def read_forward(file: Path) -> ForwardGraph:
    """Return the forward graph of a published file of the lower-set method.

    Values without a producer (inputs, parameters) are left out. As in the authors'
    programs a value costs 10 if a function whose type starts with "Conv" makes it,
    else 1; sizes are in bytes.
    """
    return _chainer(file.read_text(encoding="utf-8"), file.stem)


def with_backward(forward: ForwardGraph) -> TrainingGraph:
    """Return a training graph of a forward graph: one op for each value's gradient.

    A gradient is as large as its value, takes as long, and is made from the gradients
    of the values that are made of it, and from what these are made of and are. The
    gradients of values that nobody reads come at the boundary. This is a training graph
    with the forward graph's sizes, and not the cost model of the lower-set papers.
    """
    count, order = forward.node_count, forward.topological_order
    made_of: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, target in forward.edges:
        made_of[target].append(source)
        readers[source].append(target)
    outputs = [value for value in order if not readers[value]]
    storages: list[Storage] = []
    for kind in ("", "gradient of "):
        storages += [
            Storage(
                name=f"{kind}{forward.node_name(value)}",
                size_bytes=forward.memory_bytes[value],
                role=Role.TANGENT
                if kind and value in outputs
                else (Role.GRADIENT if kind else Role.ACTIVATION),
            )
            for value in range(count)
        ]
    ops = [
        Op(
            name=forward.node_name(value),
            reads=tuple(sorted(made_of[value])),
            writes=(value,),
            cost_ns=(forward.cost[value],),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
        )
        for value in order
    ]
    for value in reversed(order):
        if value in outputs:
            continue
        read = set(readers[value])
        read.update(*(made_of[reader] for reader in readers[value]))
        gradients = [count + reader for reader in readers[value]]
        ops.append(
            Op(
                name=f"gradient of {forward.node_name(value)}",
                reads=(*sorted(read), *sorted(gradients)),
                writes=(count + value,),
                cost_ns=(forward.cost[value],),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            )
        )
    return TrainingGraph(
        name=forward.name,
        storages=tuple(storages),
        ops=tuple(ops),
        forward_outputs=tuple(outputs),
        tangents=tuple(count + value for value in outputs),
    )


def _node_link(data: dict[str, Any], stem: str) -> TrainingGraph:
    nodes = {node.get("id", node["name"]): node for node in data["nodes"]}
    order = data["graph"].get("order") or sorted(nodes)
    position = {node: index for index, node in enumerate(order)}
    reads: list[set[int]] = [set() for _ in order]
    read: set[int] = set()
    for link in data["links"]:
        source = position[link.get("source", link.get("0"))]
        target = position[link.get("target", link.get("1"))]
        reads[target].add(source)
        read.add(source)
    storages: list[Storage] = []
    index: dict[int, int] = {}
    ops: list[Op] = []
    for at, name in enumerate(order):
        node = nodes[name]
        size = int(node.get("cost_ram", node.get("out_cost")))
        cost = node.get("cost_cpu", node.get("duration"))
        if cost != int(cost):
            msg = f"node {name} costs {cost}; only integers are exact"
            raise ValueError(msg)
        if at in read:
            index[at] = len(storages)
            storages.append(Storage(name=str(node["name"]), size_bytes=size))
        is_backward = bool(node.get("backward", False))
        ops.append(
            Op(
                name=str(node["name"]),
                reads=tuple(index[source] for source in sorted(reads[at])),
                writes=(index[at],) if at in read else (),
                cost_ns=(int(cost),),
                workspace_bytes=(0 if at in read else size,),
                phase=Phase.BACKWARD if is_backward else Phase.FORWARD,
            )
        )
    name = stem.removesuffix("_train").split("_w")[0]
    return TrainingGraph(name=name, storages=tuple(storages), ops=tuple(ops))


def _chainer(text: str, stem: str) -> ForwardGraph:
    lines = iter(text.splitlines())
    variables, functions = map(int, next(lines).split())
    sizes: dict[int, int] = {}
    for _ in range(variables):
        number, size, _ = next(lines).split(maxsplit=2)
        sizes[int(number)] = int(size)
    cost: dict[int, int] = {}
    reads: set[tuple[int, int]] = set()
    for _ in range(functions):
        direction, read, made, kind = _function(lines)
        if direction == "forward":
            for v in made:
                cost[v] = 10 if kind.startswith("Conv") else 1
            reads |= {(u, v) for u in read for v in made}
    nodes = sorted(cost)
    index = {node: position for position, node in enumerate(nodes)}
    return ForwardGraph.of_values(
        [sizes[node] for node in nodes],
        [cost[node] for node in nodes],
        sorted((index[u], index[v]) for u, v in reads if u in index),
        name=stem.removeprefix("cg_"),
    )


def _function(lines: Iterator[str]) -> tuple[str, list[int], list[int], str]:
    """Return the direction, the inputs, the outputs and the type of a function."""
    direction = next(lines)
    inputs, outputs = map(int, next(lines).split())
    read = [int(next(lines).split()[0]) for _ in range(inputs)]
    made = [int(next(lines)) for _ in range(outputs)]
    kind = next(lines)
    next(lines)  # Its settings.
    return direction, read, made, kind
