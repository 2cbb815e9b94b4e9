"""Four convolutional networks, written from the architecture tables of their papers.

Widths are parameters, so that the same topology runs on two CPU cores (narrow) and on
a GPU (as published). Every network draws its parameters from the global generator.

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
"""

import torch
from torch import Tensor, nn

RESNET50_BLOCKS = (3, 4, 6, 3)
VGG19_CONVOLUTIONS = (2, 2, 4, 4, 4)
DENSENET121_LAYERS = (6, 12, 24, 16)


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
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.reduce = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.spatial = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
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
            for block in range(n_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(channels, inner, stride))
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
    """Two 3 x 3 convolutions, each with batch normalisation and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """An encoder and decoder with a long skip at every resolution.

    Convolutions are padded and normalised, unlike the published ones, as is usual
    since; the dropout at the bottom is the paper's.

    Parameters
    ----------
    depth
        Number of halvings, 4 as published.
    width
        Channels at full resolution, 64 as published; doubled at each halving.
    n_classes
        Number of outputs per pixel.
    dropout
        Probability that a value at the bottom is dropped.
    """

    def __init__(
        self,
        depth: int = 4,
        width: int = 64,
        n_classes: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(
            DoubleConvolution(in_channels, out_channels)
            for in_channels, out_channels in zip([3, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.upsample = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
            for channels in reversed(widths[:-1])
        )
        self.decoder = nn.ModuleList(
            DoubleConvolution(2 * channels, channels)
            for channels in reversed(widths[:-1])
        )
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        x = self.dropout(skips.pop())
        for upsample, block in zip(self.upsample, self.decoder, strict=True):
            x = block(torch.cat((skips.pop(), upsample(x)), dim=1))
        return self.head(x)


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
