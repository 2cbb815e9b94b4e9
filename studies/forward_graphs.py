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
from itertools import pairwise
from pathlib import Path

from remat.algorithms.lower_sets.forward_graph import ForwardGraph

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


@dataclass(slots=True)
class _Images:
    """Writes down the forward graph of a convolutional network, value by value."""

    batch: int
    memory_bytes: list[int] = field(default_factory=list[int])
    cost: list[int] = field(default_factory=list[int])
    edges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(
        self, channels: int, side: int, *reads: int, is_convolution: bool = False
    ) -> int:
        """Add a value of single-precision numbers and return its index."""
        value = len(self.memory_bytes)
        self.memory_bytes.append(4 * self.batch * channels * side * side)
        self.cost.append(10 if is_convolution else 1)
        self.edges += [(u, value) for u in reads]
        return value

    def convolve(self, channels: int, side: int, *reads: int) -> int:
        return self.add(channels, side, *reads, is_convolution=True)

    def norm_relu(self, channels: int, side: int, read: int) -> int:
        return self.add(channels, side, self.add(channels, side, read))

    def graph(self, name: str) -> ForwardGraph:
        return ForwardGraph.of_values(
            self.memory_bytes, self.cost, self.edges, name=name
        )


def resnet(blocks: Sequence[int], *, batch: int, name: str) -> ForwardGraph:
    """Return a bottleneck ResNet on images of 224 x 224, one value per function.

    ``resnet((3, 4, 6, 3), batch=32)`` has the values, edges and bytes of the published
    ResNet-50.
    """
    net = _Images(batch)
    value = net.norm_relu(64, 112, net.convolve(64, 112))
    value = net.add(64, 56, value)
    side = 56
    for stage, repeats in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(repeats):
            # As in Chainer's ResNet the first convolution of a stage has the stride.
            if stage > 0 and block == 0:
                side //= 2
            skip = value
            value = net.norm_relu(width, side, net.convolve(width, side, value))
            value = net.norm_relu(width, side, net.convolve(width, side, value))
            value = net.add(4 * width, side, net.convolve(4 * width, side, value))
            if block == 0:
                skip = net.convolve(4 * width, side, skip)
                skip = net.add(4 * width, side, skip)
            value = net.add(4 * width, side, value, skip)
            value = net.add(4 * width, side, value)
    return _classify(net, 256 * 2 ** (len(blocks) - 1), value, name)


def densenet(
    blocks: Sequence[int], *, growth: int, batch: int, name: str
) -> ForwardGraph:
    """Return a DenseNet on images of 224 x 224, with running concatenations."""
    net = _Images(batch)
    channels, side = 2 * growth, 56
    value = net.norm_relu(channels, 112, net.convolve(channels, 112))
    value = net.add(channels, side, value)
    for stage, repeats in enumerate(blocks):
        for _ in range(repeats):
            new = net.norm_relu(channels, side, value)
            new = net.norm_relu(4 * growth, side, net.convolve(4 * growth, side, new))
            new = net.convolve(growth, side, new)
            channels += growth
            value = net.add(channels, side, value, new)
        value = net.norm_relu(channels, side, value)
        if stage < len(blocks) - 1:
            channels //= 2
            value = net.convolve(channels, side, value)
            side //= 2
            value = net.add(channels, side, value)
    return _classify(net, channels, value, name)


def _classify(net: _Images, channels: int, value: int, name: str) -> ForwardGraph:
    """Add pooling, reshaping, the linear layer of 1000 classes, and the loss."""
    value = net.add(channels, 1, value)
    value = net.add(channels, 1, value)
    value = net.add(1000, 1, value)
    net.add(1, 1, value)
    net.memory_bytes[-1] = 4
    return net.graph(name)


def resnet50() -> ForwardGraph:
    """Return the shape of ResNet-50, batch 32."""
    return resnet((3, 4, 6, 3), batch=32, name="resnet50 shape")


def resnet152() -> ForwardGraph:
    """Return the shape of ResNet-152, batch 32."""
    return resnet((3, 8, 36, 3), batch=32, name="resnet152")


def densenet161() -> ForwardGraph:
    """Return the shape of DenseNet-161, batch 32."""
    return densenet((6, 12, 36, 24), growth=48, batch=32, name="densenet161")


def towers(
    count: int, length: int, *, memory_bytes: int = 1 << 20, cost: int = 10
) -> ForwardGraph:
    """Return parallel chains between a first and a last value.

    It has ``(length + 1) ** count + 2`` lower sets.
    """
    nodes = count * length + 2
    edges: list[tuple[int, int]] = []
    for tower in range(count):
        values = [0, *range(1 + tower * length, 1 + (tower + 1) * length), nodes - 1]
        edges += list(pairwise(values))
    return ForwardGraph.of_values(
        [memory_bytes] * nodes,
        [cost] * nodes,
        edges,
        name=f"{count} towers of {length}",
    )
