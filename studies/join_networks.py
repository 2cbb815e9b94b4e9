"""Models whose forward graph is a join of branches, and long chains, for studies.

Siamese and triplet networks (branches that share their parameters), an image and text
model after CLIP (two unequal transformers), and ResNet-101. Random weights and batches,
a step in about a second on one core; everything else as in :mod:`studies.models`.

References
----------
R. Hadsell, S. Chopra, Y. LeCun. Dimensionality reduction by learning an invariant
mapping. CVPR 2006 (contrastive loss).
F. Schroff, D. Kalenichenko, J. Philbin. FaceNet: a unified embedding for face
recognition and clustering. CVPR 2015 (triplet loss).
A. Radford et al. Learning transferable visual models from natural language
supervision. ICML 2021 (CLIP).
"""

from collections.abc import Callable, Sequence

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from studies.models import (
    DEFAULT_OPTIONS,
    MODELS,
    N_CLASSES,
    VOCABULARY,
    LossInside,
    Options,
    Workload,
    classification_loss,
)
from studies.networks import ResNet

MARGIN = 1.0


class ConvolutionalEncoder(nn.Module):
    """A plain chain of convolutions, from images to embeddings.

    Parameters
    ----------
    layers
        Convolutions at each resolution, which is then halved.
    width
        Channels at the first resolution; doubled with each halving.
    size
        Numbers of an embedding.
    """

    def __init__(self, layers: Sequence[int], width: int, size: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for level, count in enumerate(layers):
            for _ in range(count):
                out = width * 2**level
                blocks += [
                    nn.Conv2d(channels, out, 3, padding=1, bias=False),
                    nn.BatchNorm2d(out),
                    nn.ReLU(inplace=True),
                ]
                channels = out
            blocks.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class SharedEncoder(nn.Module):
    """One encoder for every input: the branches share its parameters."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.encoder(x) for x in inputs)


class ImageText(nn.Module):
    """CLIP without its bookkeeping: images and texts to their similarities."""

    def __init__(self, config: transformers.CLIPConfig) -> None:
        super().__init__()
        self.model = transformers.CLIPModel(config)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        found = self.model(input_ids=tokens, pixel_values=images)
        return found.logits_per_image


def contrastive_loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Pull pairs of one class together, push others apart up to a margin."""
    distance = functional.pairwise_distance(*outputs)
    apart = functional.relu(MARGIN - distance)
    return torch.where(labels > 0, distance**2, apart**2).mean()


def triplet_loss(outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
    """Make the positive nearer than the negative by a margin, weighted per triplet."""
    anchor, positive, negative = outputs
    near = functional.pairwise_distance(anchor, positive)
    far = functional.pairwise_distance(anchor, negative)
    return (functional.relu(near - far + MARGIN) * labels).mean()


def matching_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Average the cross-entropies of images given texts and of texts given images."""
    by_image = functional.cross_entropy(outputs, labels)
    return (by_image + functional.cross_entropy(outputs.T, labels)) / 2


def siamese(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build a siamese convolutional network with contrastive loss."""
    batch, side, encoder = _encoder(options, batch=12)
    inputs = tuple(_images(batch, side) for _ in range(2))
    labels = torch.randint(2, (batch,))
    return _workload(
        "siamese", SharedEncoder(encoder), inputs, labels, contrastive_loss, options
    )


def triplet(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build a triplet network: one encoder, three inputs."""
    batch, side, encoder = _encoder(options, batch=8)
    inputs = tuple(_images(batch, side) for _ in range(3))
    labels = torch.ones(batch)
    return _workload(
        "triplet", SharedEncoder(encoder), inputs, labels, triplet_loss, options
    )


def clip(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build an image and text model of two unequal transformers."""
    torch.manual_seed(options.seed)
    width, batch = (
        (16, 16) if options.tiny else (128 * options.scale, 8 * options.scale)
    )
    side, patch, length = (32, 8, 16) if options.tiny else (112, 8, 64)
    shared = {"num_attention_heads": 4, "attention_dropout": 0.0}
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": 2 if options.tiny else 8,
            "max_position_embeddings": length,
            "eos_token_id": VOCABULARY - 1,
            **shared,
        },
        vision_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": 2 if options.tiny else 6,
            "image_size": side,
            "patch_size": patch,
            **shared,
        },
        projection_dim=width,
    )
    tokens = torch.randint(2, VOCABULARY - 1, (batch, length))
    tokens[:, -1] = VOCABULARY - 1
    images = torch.randn(batch, 3, side, side)
    return _workload(
        "clip",
        ImageText(config),
        (images, tokens),
        torch.arange(batch),
        matching_loss,
        options,
        lambda model: AdamW(model.parameters(), lr=1e-4),
    )


def resnet101(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build ResNet-101 (a long chain of blocks with shortcuts)."""
    torch.manual_seed(options.seed)
    blocks = (1, 3) if options.tiny else (3, 4, 23, 3)
    width = 8 if options.tiny else 16 * options.scale
    batch, side = (2, 32) if options.tiny else (8 * options.scale, 160)
    return _workload(
        "resnet101",
        ResNet(blocks, width=width, n_classes=N_CLASSES),
        (_images(batch, side),),
        torch.randint(N_CLASSES, (batch,)),
        classification_loss,
        options,
    )


JOINS: dict[str, Callable[..., Workload]] = {
    "siamese": siamese,
    "triplet": triplet,
    "clip": clip,
}
"""Models whose branches meet in the loss."""

CHAINS: dict[str, Callable[..., Workload]] = {
    "vgg19": MODELS["vgg19"],
    "resnet101": resnet101,
    "gpt2": MODELS["gpt2"],
}
"""Models that are chains of blocks."""


def _encoder(options: Options, *, batch: int) -> tuple[int, int, nn.Module]:
    """Return batch, side of images and encoder; seeds the generator."""
    torch.manual_seed(options.seed)
    if options.tiny:
        return 2, 16, ConvolutionalEncoder((1, 2), 8, 16)
    encoder = ConvolutionalEncoder((2, 3, 3, 3), 16 * options.scale, 64)
    return batch * options.scale, 96, encoder


def _images(count: int, side: int) -> Tensor:
    images = torch.randn(count, 3, side, side)
    return images.contiguous(memory_format=torch.channels_last)


def _workload(
    name: str,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    labels: Tensor,
    criterion: Callable[..., Tensor],
    options: Options,
    make_optimizer: Callable[[nn.Module], Optimizer] = lambda model: SGD(
        model.parameters(), lr=0.01, momentum=0.9
    ),
) -> Workload:
    """Put the parts on the device, the loss inside or outside."""
    device = torch.device(options.device)
    model.train()
    if name != "clip":
        model = model.to(memory_format=torch.channels_last)
    labels = labels.to(device)
    kwargs: dict[str, Tensor] = {}
    if options.is_loss_inside:
        model, kwargs = LossInside(model, criterion), {"labels": labels}
    return Workload(
        name=name,
        model=model.to(device),
        args=tuple(x.to(device) for x in inputs),
        kwargs=kwargs,
        loss=None
        if options.is_loss_inside
        else lambda outputs: criterion(outputs, labels),
        make_optimizer=make_optimizer,
    )
