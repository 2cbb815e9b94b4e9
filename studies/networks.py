"""Convolutional networks, written from the architecture tables of their papers.

Widths are parameters, so that the same topology runs on two CPU cores (narrow) and on
a GPU (as published). Every network draws its parameters from the global generator.
Networks with auxiliary classifiers return a tuple, the scores that count most first.

References
----------
.. [1] K. He, X. Zhang, S. Ren, J. Sun. Deep residual learning for image recognition.
   CVPR 2016, table 1.
.. [2] K. Simonyan, A. Zisserman. Very deep convolutional networks for large-scale
   image recognition. ICLR 2015, table 1, column E.
.. [3] O. Ronneberger, P. Fischer, T. Brox. U-Net: convolutional networks for
   biomedical image segmentation. MICCAI 2015, figure 1.
.. [4] G. Huang, Z. Liu, L. van der Maaten, K. Weinberger. Densely connected
   convolutional networks. CVPR 2017, table 1.
.. [5] C. Szegedy et al. Going deeper with convolutions. CVPR 2015, table 1.
.. [6] H. Zhao, J. Shi, X. Qi, X. Wang, J. Jia. Pyramid scene parsing network. CVPR
   2017, figure 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

RESNET50_BLOCKS = (3, 4, 6, 3)
RESNET101_BLOCKS = (3, 4, 23, 3)
RESNET152_BLOCKS = (3, 8, 36, 3)
VGG19_CONVOLUTIONS = (2, 2, 4, 4, 4)
DENSENET121_LAYERS = (6, 12, 24, 16)
DENSENET161_LAYERS = (6, 12, 36, 24)
InceptionChannels = tuple[int, int, int, int, int, int]
GOOGLENET_INCEPTIONS: tuple[tuple[InceptionChannels, ...], ...] = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


class Bottleneck(nn.Module):
    """A residual block of three convolutions; the middle one may halve the image.

    Parameters
    ----------
    in_channels
        Channels of the input.
    width
        Channels of the two inner convolutions; the block returns four times as many.
    stride
        Stride of the middle convolution, 1 or 2.
    dilation
        Distance of the pixels that the middle convolution reads, at least 1.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, dilation: int = 1
    ) -> None:
        super().__init__()
        out_channels = 4 * width
        self.reduce = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.spatial = nn.Conv2d(
            width, width, 3, stride, dilation, dilation, bias=False
        )
        self.norm2 = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.reduce(x)))
        h = self.relu(self.norm2(self.spatial(h)))
        h = self.norm3(self.expand(h))
        h += self.shortcut(x)
        return self.relu(h)


def bottlenecks(
    in_channels: int, width: int, n_blocks: int, *, stride: int, dilation: int = 1
) -> list[Bottleneck]:
    """Return one stage of a residual network, whose first block may halve the image.

    Parameters
    ----------
    in_channels
        Channels of the input.
    width
        Channels inside the blocks; the stage returns four times as many.
    n_blocks
        Number of blocks, at least 1.
    stride, dilation
        Stride of the first block, and dilation of all.
    """
    return [
        Bottleneck(
            in_channels if block == 0 else 4 * width,
            width,
            stride if block == 0 else 1,
            dilation,
        )
        for block in range(n_blocks)
    ]


class ResNet(nn.Module):
    """A bottleneck residual network; the defaults are ResNet-50 as published.

    Parameters
    ----------
    blocks
        Bottleneck blocks per stage; each stage after the first halves the image.
    width
        Channels of the stem, 64 as published; a multiple of 1.
    n_classes
        Number of outputs per image.
    """

    def __init__(
        self,
        blocks: tuple[int, ...] = RESNET50_BLOCKS,
        width: int = 64,
        n_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        layers: list[nn.Module] = []
        channels = width
        for stage, n_blocks in enumerate(blocks):
            inner = width << stage
            stride = 2 if stage > 0 else 1
            layers += bottlenecks(channels, inner, n_blocks, stride=stride)
            channels = 4 * inner
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stages(self.stem(x))
        return self.head(h.mean(dim=(2, 3)))


class VGG(nn.Module):
    """A plain convolutional network with dropout; the defaults are VGG-19.

    Parameters
    ----------
    convolutions
        3 x 3 convolutions per stage; each stage ends by halving the image.
    width
        Channels of the first stage, 64 as published; doubled up to 8 times as many.
    image
        Side of the square input in pixels, a multiple of 2 to the number of stages.
    hidden
        Units of the two fully connected layers, 4096 as published.
    n_classes
        Number of outputs per image.
    dropout
        Probability that a hidden unit is dropped.
    """

    def __init__(
        self,
        convolutions: tuple[int, ...] = VGG19_CONVOLUTIONS,
        width: int = 64,
        image: int = 224,
        hidden: int = 4096,
        n_classes: int = 1000,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage, n_convolutions in enumerate(convolutions):
            out_channels = width * min(1 << stage, 8)
            for _ in range(n_convolutions):
                layers += [
                    nn.Conv2d(channels, out_channels, 3, padding=1),
                    nn.ReLU(inplace=True),
                ]
                channels = out_channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = image >> len(convolutions)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, n_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class DoubleConvolution(nn.Sequential):
    """Two 3 x 3 convolutions without padding, each with ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """An encoder and decoder with a long skip at every resolution.

    As the network that the authors of [3]_ released: convolutions are not padded, so
    that skips are cropped before they are concatenated and the output is smaller than
    the input; the last upsampling does not halve the channels, unlike in their figure.

    Parameters
    ----------
    depth
        Number of halvings, 4 as published.
    width
        Channels at full resolution, 64 as published; doubled at each halving.
    n_classes
        Number of outputs per pixel.
    dropout
        Probability that a value of the two lowest resolutions is dropped.
    """

    def __init__(
        self,
        depth: int = 4,
        width: int = 64,
        n_classes: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(
            DoubleConvolution(in_channels, out_channels)
            for in_channels, out_channels in zip([3, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.upsample = nn.ModuleList()
        self.decoder = nn.ModuleList()
        for level in reversed(range(depth)):
            channels = widths[level]
            upsampled = channels if level > 0 else 2 * channels
            self.upsample.append(
                nn.Sequential(
                    nn.ConvTranspose2d(2 * channels, upsampled, 2, stride=2),
                    nn.ReLU(inplace=True),
                )
            )
            self.decoder.append(DoubleConvolution(channels + upsampled, channels))
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            if level + 2 >= len(self.encoder):
                x = self.dropout(x)
            skips.append(x)
        x = skips.pop()
        for upsample, block in zip(self.upsample, self.decoder, strict=True):
            x = upsample(x)
            x = block(torch.cat((_cropped(skips.pop(), x.shape[-1]), x), dim=1))
        return self.head(x)


def unet_output_side(side: int, depth: int = 4) -> int:
    """Return the side of a U-Net's output for a square input.

    Raises
    ------
    ValueError
        If a resolution is too small or cannot be halved.

    Examples
    --------
    >>> unet_output_side(572)
    388
    """
    inner = side - 4
    for _ in range(depth):
        if inner % 2 or inner < 6:
            msg = f"images of {side} pixels cannot be halved {depth} times"
            raise ValueError(msg)
        inner = inner // 2 - 4
    output = inner
    for _ in range(depth):
        output = 2 * output - 4
    if output < 1:
        msg = f"images of {side} pixels leave no output at depth {depth}"
        raise ValueError(msg)
    return output


def _cropped(x: Tensor, side: int) -> Tensor:
    """Return the middle of square images."""
    start = (x.shape[-1] - side) // 2
    return x[:, :, start : start + side, start : start + side]


class DenseLayer(nn.Module):
    """A bottleneck layer that appends ``growth`` channels to all earlier ones."""

    def __init__(self, in_channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.grow = nn.Sequential(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(in_channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.grow(x)), dim=1)


class DenseNet(nn.Module):
    """A densely connected network; the defaults are DenseNet-121 as published.

    Parameters
    ----------
    layers
        Dense layers per block; transitions between blocks halve image and channels.
    growth
        Channels that each layer adds; the stem has twice as many.
    n_classes
        Number of outputs per image.
    dropout
        Probability that a new value is dropped.
    """

    def __init__(
        self,
        layers: tuple[int, ...] = DENSENET121_LAYERS,
        growth: int = 32,
        n_classes: int = 1000,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        channels = 2 * growth
        stages: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for block, n_layers in enumerate(layers):
            if block > 0:
                stages += [
                    nn.BatchNorm2d(channels),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(channels, channels // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                channels //= 2
            for _ in range(n_layers):
                stages.append(DenseLayer(channels, growth, dropout))
                channels += growth
        stages += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*stages)
        self.head = nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


class Inception(nn.Module):
    """Four branches side by side, concatenated, then one ReLU over all.

    Parameters
    ----------
    in_channels
        Channels of the input.
    channels
        Channels of the 1 x 1 branch; of the reduction and the convolution of the
        3 x 3 branch; the same of the 5 x 5 branch; of the pooled branch.
    """

    def __init__(self, in_channels: int, channels: InceptionChannels) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pooled = channels
        self.one = nn.Conv2d(in_channels, one, 1)
        self.three = _reduced_convolution(in_channels, reduce3, three, kernel=3)
        self.five = _reduced_convolution(in_channels, reduce5, five, kernel=5)
        self.pooled = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(in_channels, pooled, 1)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.one(x), self.three(x), self.five(x), self.pooled(x))
        return self.relu(torch.cat(branches, dim=1))


def _reduced_convolution(
    in_channels: int, reduced: int, out_channels: int, *, kernel: int
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, reduced, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(reduced, out_channels, kernel, padding=kernel // 2),
    )


class AuxiliaryClassifier(nn.Sequential):
    """A classifier of an inner layer of GoogLeNet."""

    def __init__(self, in_channels: int, width: int, n_classes: int) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(4),
            nn.Conv2d(in_channels, 2 * width, 1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(32 * width, 16 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.7),
            nn.Linear(16 * width, n_classes),
        )


class GoogLeNet(nn.Module):
    """An inception network with two auxiliary classifiers; by default as published.

    Parameters
    ----------
    inceptions
        Inception blocks per stage, with their channels at a width of 64; three
        stages, the middle one of at least three blocks. Auxiliary classifiers follow
        its first and its last but one.
    width
        Channels of the stem, 64 as published; all others in proportion.
    n_classes
        Number of outputs per image.
    dropout
        Probability that a value before the last layer is dropped.
    """

    def __init__(
        self,
        inceptions: Sequence[Sequence[InceptionChannels]] = GOOGLENET_INCEPTIONS,
        width: int = 64,
        n_classes: int = 1000,
        dropout: float = 0.4,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            nn.LocalResponseNorm(5),
            nn.Conv2d(width, width, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 3 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5),
        ]
        parts: list[nn.Sequential] = []
        heads: list[nn.Module] = []
        channels = 3 * width
        for stage, blocks in enumerate(inceptions):
            layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
            for block, full in enumerate(blocks):
                one, reduce3, three, reduce5, five, pooled = (
                    max(1, n * width // 64) for n in full
                )
                scaled = (one, reduce3, three, reduce5, five, pooled)
                layers.append(Inception(channels, scaled))
                channels = one + three + five + pooled
                if stage == 1 and block in {0, len(blocks) - 2}:
                    parts.append(nn.Sequential(*layers))
                    heads.append(AuxiliaryClassifier(channels, width, n_classes))
                    layers = []
        self.parts = nn.ModuleList([*parts, nn.Sequential(*layers)])
        self.auxiliary_heads = nn.ModuleList(heads)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        *parts, last = self.parts
        scores: list[Tensor] = []
        for part, head in zip(parts, self.auxiliary_heads, strict=True):
            x = part(x)
            scores.append(head(x))
        return (self.head(self.dropout(last(x).mean(dim=(2, 3)))), *scores)


class PyramidPooling(nn.Module):
    """Means over coarser and coarser grids, beside the input itself.

    Parameters
    ----------
    in_channels
        Channels of the input; the output has twice as many.
    grids
        Cells along each side, for each branch.
    """

    def __init__(self, in_channels: int, grids: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(grid),
                *_normalised_convolution(in_channels, in_channels // len(grids), 1),
            )
            for grid in grids
        )

    def forward(self, x: Tensor) -> Tensor:
        branches = (_resized(branch(x), x.shape[2:]) for branch in self.branches)
        return torch.cat((x, *branches), dim=1)


class PSPNet(nn.Module):
    """A dilated residual network with pyramid pooling; by default as published.

    Parameters
    ----------
    blocks
        Bottleneck blocks of the four stages, those of ResNet-101 as published.
    width
        Channels of the stem, 64 as published.
    n_classes
        Number of outputs per pixel.
    grids
        Branches of the pyramid.
    dropout
        Probability that a value before the last layers is dropped.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int] = RESNET101_BLOCKS,
        width: int = 64,
        n_classes: int = 17,
        grids: tuple[int, ...] = (1, 2, 3, 6),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        n1, n2, n3, n4 = blocks
        self.body = nn.Sequential(
            *_normalised_convolution(3, width, 3, stride=2),
            *_normalised_convolution(width, width, 3),
            *_normalised_convolution(width, 2 * width, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
            *bottlenecks(2 * width, width, n1, stride=1),
            *bottlenecks(4 * width, 2 * width, n2, stride=2),
            *bottlenecks(8 * width, 4 * width, n3, stride=1, dilation=2),
        )
        self.last_stage = nn.Sequential(
            *bottlenecks(16 * width, 8 * width, n4, stride=1, dilation=4)
        )
        self.pyramid = PyramidPooling(32 * width, grids)
        self.head = nn.Sequential(
            *_normalised_convolution(64 * width, 8 * width, 3),
            nn.Dropout(dropout),
            nn.Conv2d(8 * width, n_classes, 1),
        )
        self.auxiliary_head = nn.Sequential(
            *_normalised_convolution(16 * width, 4 * width, 3),
            nn.Dropout(dropout),
            nn.Conv2d(4 * width, n_classes, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inner = self.body(x)
        scores = self.head(self.pyramid(self.last_stage(inner)))
        side = x.shape[2:]
        return _resized(scores, side), _resized(self.auxiliary_head(inner), side)


def _normalised_convolution(
    in_channels: int, out_channels: int, kernel: int, *, stride: int = 1
) -> tuple[nn.Module, ...]:
    padding = kernel // 2
    return (
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Interpolate images bilinearly."""
    return functional.interpolate(
        x, size=list(size), mode="bilinear", align_corners=True
    )
