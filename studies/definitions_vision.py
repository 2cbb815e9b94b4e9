"""Definitions from timm and torchvision: images, films, detection."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from studies.definitions import (
    Definition,
    Example,
    Registry,
    library,
    registering,
    torchvision,
)

DEFINITIONS: Registry = {}
define = registering(DEFINITIONS, "torchvision")

N_CLASSES = 5


class Classified(nn.Module):
    """A network of images with the loss of its classes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(images), labels)


def images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    """Return random images and classes."""
    return torch.randn(batch, 3, side, side), torch.randint(0, N_CLASSES, (batch,))


def timm_class(
    name: str,
    network: str,
    source: str,
    batch: int = 8,
    side: int = 64,
    **settings: Any,
) -> None:
    """Define a classifier of timm."""

    def build() -> Example:
        torchvision()
        made = library("timm").create_model(network, num_classes=N_CLASSES, **settings)
        return Example(model=Classified(made).train(), args=images(batch, side))

    DEFINITIONS[name] = Definition(
        name=name, library="timm", source=source, build=build
    )


timm_class(
    "timm-resnet18d", "resnet18d", "He et al. 2019; stem of three, average pools"
)
timm_class("timm-efficientnet", "efficientnet_b0", "Tan and Le 2019", batch=16)
timm_class("timm-mobilenetv3", "mobilenetv3_small_100", "Howard et al. 2019", batch=16)
timm_class("timm-regnet", "regnety_002", "Radosavovic et al. 2020", batch=16)
timm_class("timm-convnext", "convnext_atto", "Liu et al. 2022", batch=16)
timm_class(
    "timm-vit",
    "vit_tiny_patch16_224",
    "Touvron et al. 2021; random depth",
    img_size=64,
    patch_size=8,
    depth=4,
    drop_path_rate=0.2,
)
timm_class(
    "timm-swin",
    "swin_tiny_patch4_window7_224",
    "Liu et al. 2021; shifted windows, random depth",
    img_size=64,
    window_size=4,
    embed_dim=32,
    depths=(2, 2),
    num_heads=(2, 4),
)
timm_class(
    "timm-eva02",
    "eva02_tiny_patch14_224",
    "Fang et al. 2023; rotary positions, gated units",
    img_size=64,
    patch_size=8,
    depth=3,
)
timm_class("timm-mixer", "mixer_s16_224", "Tolstikhin et al. 2021", img_size=64)
timm_class("timm-poolformer", "poolformer_s12", "Yu et al. 2022; random depth")
timm_class(
    "timm-edgenext", "edgenext_xx_small", "Maaz et al. 2022; transposed attention"
)
timm_class("timm-ghostnet", "ghostnet_050", "Han et al. 2020", batch=16)
timm_class(
    "timm-coatnet", "coatnet_nano_rw_224", "Dai et al. 2021", img_size=64, batch=4
)
timm_class(
    "timm-levit",
    "levit_128s",
    "Graham et al. 2021; a list of two heads",
    side=224,
    batch=2,
)
timm_class("timm-nfnet", "nfnet_l0", "Brock et al. 2021; normalised weights", batch=4)


# --- torchvision: classes, pixels, films -------------------------------------------


@define("Huang et al. 2017; its own checkpoints off")
def tv_densenet() -> Example:
    found = torchvision().models.DenseNet(
        growth_rate=8,
        block_config=(3, 4, 3),
        num_init_features=16,
        num_classes=N_CLASSES,
    )
    return Example(model=Classified(found).train(), args=images(8, 64))


@define("Huang et al. 2017 with its checkpoints on (Pleiss et al. 2017)")
def tv_densenet_checkpoints() -> Example:
    found = torchvision().models.DenseNet(
        growth_rate=8,
        block_config=(3, 4, 3),
        num_init_features=16,
        num_classes=N_CLASSES,
        memory_efficient=True,
    )
    return Example(model=Classified(found).train(), args=images(8, 64))


@define("Ma et al. 2018")
def tv_shufflenet() -> Example:
    found = torchvision().models.shufflenet_v2_x0_5(num_classes=N_CLASSES)
    return Example(model=Classified(found).train(), args=images(16, 64))


class Auxiliary(nn.Module):
    """A network with several heads, and the weighted losses of all."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        heads = self.network(images)
        loss = functional.cross_entropy(heads.logits, labels)
        for head in (heads.aux_logits1, heads.aux_logits2):
            loss = loss + 0.3 * functional.cross_entropy(head, labels)
        return {"loss": loss, "heads": heads, "nothing": None}


@define("Szegedy et al. 2015; named tuple of heads in a mapping, with a None")
def tv_googlenet() -> Example:
    found = torchvision().models.GoogLeNet(num_classes=N_CLASSES, init_weights=False)
    return Example(model=Auxiliary(found).train(), args=images(4, 96))


class Pixels(nn.Module):
    """A network of pixel scores in an ordered mapping, and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(images)["out"], labels)


@define("Chen et al. 2017; pixel scores in an ordered mapping")
def tv_deeplab() -> Example:
    found = torchvision().models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=N_CLASSES
    )
    labels = torch.randint(0, N_CLASSES, (2, 96, 96))
    return Example(
        model=Pixels(found).train(), args=(torch.randn(2, 3, 96, 96), labels)
    )


@define("Tran et al. 2018; films of 8 images")
def tv_video() -> Example:
    found = torchvision().models.video.r3d_18(weights=None, num_classes=N_CLASSES)
    labels = torch.randint(0, N_CLASSES, (2,))
    films = torch.randn(2, 3, 8, 32, 32)
    return Example(model=Classified(found).train(), args=(films, labels))


@define("Teed and Deng 2020 (RAFT); optical flow in a loop of 3")
def tv_raft() -> Example:
    found = torchvision().models.optical_flow.raft_small(weights=None)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = found

        def forward(self, one: Tensor, other: Tensor, flow: Tensor) -> Tensor:
            steps = self.network(one, other, num_flow_updates=3)
            return torch.stack([(step - flow).abs().mean() for step in steps]).sum()

    pair = torch.randn(2, 1, 3, 128, 128)
    args = (pair[0], pair[1], torch.randn(1, 2, 128, 128))
    return Example(model=Flow().train(), args=args)


# --- torchvision: detection --------------------------------------------------------


class Detected(nn.Module):
    """A detector with the sum of its losses, as its training adds them up."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        losses = self.detector(images, targets)
        return torch.stack(list(losses.values())).sum()


def boxes(count: int, side: int) -> dict[str, Tensor]:
    corners = torch.rand(count, 2) * side / 2
    sizes = torch.rand(count, 2) * side / 3 + 8
    return {
        "boxes": torch.cat([corners, corners + sizes], dim=1),
        "labels": torch.randint(1, N_CLASSES, (count,)),
    }


@define("Ren et al. 2015 on a small body; boxes chosen by value")
def tv_faster_rcnn() -> Example:
    found = torchvision()
    body: Any = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
    )
    body.out_channels = 32
    anchors = found.models.detection.anchor_utils.AnchorGenerator(
        ((16, 32, 64),), ((0.5, 1.0, 2.0),)
    )
    detector = found.models.detection.FasterRCNN(
        body,
        N_CLASSES,
        min_size=128,
        max_size=128,
        rpn_anchor_generator=anchors,
        box_roi_pool=found.ops.MultiScaleRoIAlign(["0"], 5, 2),
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=32,
        box_batch_size_per_image=16,
    )
    return detected(detector, 128)


def detected(detector: nn.Module, side: int) -> Example:
    pictures = [torch.rand(3, side, side) for _ in range(2)]
    targets = [boxes(2, side), boxes(3, side)]
    return Example(model=Detected(detector).train(), args=(pictures, targets))


@define("Lin et al. 2017; anchors matched by value")
def tv_retinanet() -> Example:
    found = torchvision()
    resnet_fpn_backbone = found.models.detection.backbone_utils.resnet_fpn_backbone
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18",
        weights=None,
        trainable_layers=5,
        returned_layers=[2, 3, 4],
    )
    detector = found.models.detection.RetinaNet(
        backbone,
        N_CLASSES,
        min_size=128,
        max_size=128,
        anchor_generator=found.models.detection.anchor_utils.AnchorGenerator(
            ((16, 24), (32, 48), (64, 96), (96, 128)), ((0.5, 1.0, 2.0),) * 4
        ),
    )
    return detected(detector, 128)


@define("Liu et al. 2016 with MobileNetV3; hard negatives chosen by value")
def tv_ssdlite() -> Example:
    detector = torchvision().models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=N_CLASSES
    )
    return detected(detector, 320)
