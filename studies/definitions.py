"""What a definition of a model is, and the list of all, for the study of many models.

A definition builds a small model with random weights, and a batch for it, whose shapes
are those of a training step: activations make up most of its peak. Nothing is
downloaded.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Random weights need no network; without this a look-up for optional kernels does.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

HOMES = (
    "studies.definitions_transformers",
    "studies.definitions_vision",
    "studies.definitions_diffusers",
    "studies.definitions_torch",
)
"""The modules with definitions, in the order in which they are run."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model in training mode and a batch.

    Parameters
    ----------
    model
        Returns its loss, or what the loss of :func:`remat.verify` can add up.
    args, kwargs
        The batch, as the model takes it.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Definition:
    """How to make one example.

    Parameters
    ----------
    name
        Its key.
    library
        The package that the model's code is from; ``"torch"`` where it is written here.
    source
        Where the architecture is from, and what the step adds to it, in one line.
    build
        Makes the example, from the global random state.
    """

    name: str
    library: str
    source: str
    build: Callable[[], Example]


Registry = dict[str, Definition]


def registering(
    registry: Registry, library: str
) -> Callable[[str], Callable[[Callable[[], Example]], Callable[[], Example]]]:
    """Return a decorator that enters builders of a library, each with its source."""

    def with_source(
        source: str,
    ) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
        def enter(build: Callable[[], Example]) -> Callable[[], Example]:
            name = build.__name__.replace("_", "-")
            registry[name] = Definition(
                name=name, library=library, source=source, build=build
            )
            return build

        return enter

    return with_source


def definitions() -> Mapping[str, Definition]:
    """Return every definition by name. Imports no library but torch."""
    found: Registry = {}
    for home in HOMES:
        found |= importlib.import_module(home).DEFINITIONS
    return found


def is_installed(library: str) -> bool:
    """Return whether a package is there, without importing it."""
    return importlib.util.find_spec(library) is not None


def library(name: str) -> Any:
    """Return a module of a package that need not be installed."""
    return importlib.import_module(name)


def torchvision() -> Any:
    """Return torchvision, also where its compiled operators do not fit torch.

    Those of the package index are made for CUDA. Without them its Python runs, with
    :func:`suppressed` and :func:`aligned` for two operators of which one has no other
    formula, and the other one that ``torch.compile`` must compile. Libraries that
    import torchvision if it is there need this to be called before.
    """
    try:
        found = library("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        found = library("torchvision")
    if not found.extension._has_ops():  # noqa: SLF001
        found.ops.boxes.nms = suppressed
        found.ops.poolers.roi_align = aligned
    return found


def suppressed(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the boxes that no better one overlaps, best first."""
    box_iou = library("torchvision.ops.boxes").box_iou
    order = scores.argsort(descending=True)
    overlaps: Any = box_iou(boxes[order], boxes[order]) > iou_threshold
    overlaps = overlaps.cpu().numpy()
    is_kept: Any = ~overlaps[:0].any(0)
    for position in range(len(is_kept)):
        if is_kept[position]:
            is_kept[position + 1 :] &= ~overlaps[position, position + 1 :]
    return order[torch.from_numpy(is_kept).to(order.device)]


def aligned(
    features: Tensor,
    rois: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    """Return means of bilinear samples in a grid over each region of interest."""
    height, width = features.shape[2:]
    count = output_size[0] * sampling_ratio
    steps = (torch.arange(count, device=rois.device) + 0.5) / count
    corners = rois[:, 1:] * spatial_scale
    x = corners[:, :1] + steps * (corners[:, 2:3] - corners[:, :1])
    y = corners[:, 1:2] + steps * (corners[:, 3:] - corners[:, 1:2])
    x, y = 2 * x / width - 1, 2 * y / height - 1
    shape = (len(rois), count, count)
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], -1)
    sampled = nn.functional.grid_sample(
        features[rois[:, 0].long()], grid, align_corners=False
    )
    return nn.functional.avg_pool2d(sampled, sampling_ratio)
