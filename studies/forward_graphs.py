"""Forward graphs of known networks: the published ones, and shapes like the others.

The authors of the lower-set method (Kusumoto et al., NeurIPS 2019) published the
computation graphs of five of their seven networks
(github.com/pfnet-research/recompute, ``computational_graphs``); where a copy of them is
at hand they are read from it. ResNet-152 and DenseNet-161 are not among them: here they
are built from the networks' block structure, in the same units.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remat.lower_sets.forward_graph import ForwardGraph

PUBLISHED = ("vgg19", "unet", "resnet50", "pspnet", "googlenet")
"""The networks of which the authors' graphs exist."""


def shared_folder() -> Path | None:
    """Return the folder with published data beside the repository, or ``None``.

    ``REMAT_SHARED`` names another place.
    """
    default = Path(__file__).resolve().parent.parent.parent / "shared"
    folder = Path(os.environ.get("REMAT_SHARED", default))
    return folder if folder.is_dir() else None


def published_file(network: str) -> Path | None:
    """Return the file of a published graph, or ``None`` if it is not at hand."""
    folder = shared_folder()
    if folder is None:
        return None
    file = folder / "instances" / "lowersets" / f"cg_{network}.txt"
    return file if file.is_file() else None


def read_published(file: Path) -> ForwardGraph:
    """Return the forward graph of a file of the authors.

    Values without a producer (inputs, parameters) are left out. As in the authors'
    programs a value costs 10 if a function whose type starts with "Conv" makes it,
    else 1; sizes are in bytes.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    variables, functions = map(int, lines[0].split())
    sizes: dict[int, int] = {}
    for line in lines[1 : 1 + variables]:
        number, size, _ = line.split(maxsplit=2)
        sizes[int(number)] = int(size)
    cost: dict[int, int] = {}
    reads: set[tuple[int, int]] = set()
    position = 1 + variables
    for _ in range(functions):
        direction = lines[position]
        inputs, outputs = map(int, lines[position + 1].split())
        position += 2
        read = [int(line.split()[0]) for line in lines[position : position + inputs]]
        position += inputs
        made = [int(line) for line in lines[position : position + outputs]]
        position += outputs
        kind = lines[position]
        position += 2
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
        name=file.stem.removeprefix("cg_"),
    )
