"""Steps predicted for devices that are not here, against what was measured.

    python -m studies.hardware devices [names...]   twenty models on ten devices
    python -m studies.hardware memory               published memory of GPUs
    python -m studies.hardware time                 published step times of an RTX 3090
    python -m studies.hardware cpu                  the study models on this CPU
    python -m studies.hardware --tables             writes docs/hardware.md

Models are on the ``meta`` device, with the sizes that were published. Nothing runs but,
for ``cpu``, one matrix product and one copy, which give the rates of this machine; its
measured peaks and operator times are those of ``studies/results/budgets.jsonl``.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.core.hardware import CLASSES, Hardware, numbers_of
from remat.core.units import format_bytes, format_ns
from remat.files.hardware import hardware_names
from remat.planning.device_estimates import DeviceComparison
from remat.profile.estimate import measure_rates
from studies.models import MODELS
from studies.networks import (
    DENSENET121_LAYERS,
    RESNET50_BLOCKS,
    RESNET101_BLOCKS,
    RESNET152_BLOCKS,
    VGG,
    DenseNet,
    ResNet,
    UNet,
)
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, append, environment, read

FILE = RESULTS / "hardware.jsonl"
PAGE = ROOT / "docs" / "hardware.md"
SECONDS = 2.0

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step without memory.

    Parameters
    ----------
    model
        On the ``meta`` device.
    args, kwargs
        Its batch.
    loss
        From the model's outputs, ``None`` if the model returns it.
    optimizer
        From parameters.
    autocast
        The type of low precision, ``None`` for none.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = torch.bfloat16

    def compared(self, devices: Sequence[Any], **options: Any) -> DeviceComparison:
        """Return what the step takes on devices."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            context = torch.autocast("cpu", dtype=self.autocast)
        with context:
            return remat.compare_devices(
                self.model,
                self.args,
                self.kwargs,
                devices=devices,
                optimizer=self.optimizer(self.model.parameters()),
                loss=self.loss,
                **options,
            )


def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def images(batch: int, side: int = 224, width: int | None = None) -> Tensor:
    return zeros(batch, 3, side, width or side, dtype=torch.float32)


def class_loss(outputs: Any) -> Tensor:
    scores = getattr(outputs, "logits", outputs)
    labels = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    return functional.cross_entropy(scores, labels)


def next_word_loss(outputs: Any) -> Tensor:
    scores = outputs.logits[:, :-1]
    labels = torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def pixel_loss(outputs: Any) -> Tensor:
    shape = (len(outputs), *outputs.shape[2:])
    return functional.cross_entropy(outputs, torch.zeros(shape, dtype=torch.long))


def last_mean(outputs: Any) -> Tensor:
    return outputs.last_hidden_state.float().square().mean()


def made(kind: str, config: str, **settings: Any) -> nn.Module:
    """Return a model of transformers on the ``meta`` device, in training mode."""
    settings.setdefault("attn_implementation", "sdpa")
    with torch.device("meta"):
        built = getattr(transformers, config)(**settings)
        return getattr(transformers, kind)(built).train()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _gpt2(layers: int, width: int, heads: int, batch: int) -> Case:
    model = made(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        use_cache=False,
    )
    return Case(
        model=model, kwargs={"input_ids": zeros(batch, 1024)}, loss=next_word_loss
    )


def _llama(batch: int, length: int, **settings: Any) -> Case:
    model = made("LlamaForCausalLM", "LlamaConfig", use_cache=False, **settings)
    return Case(
        model=model, kwargs={"input_ids": zeros(batch, length)}, loss=next_word_loss
    )


def _encoder(kind: str, config: str, batch: int, **settings: Any) -> Case:
    model = made(kind, config, **settings)
    return Case(
        model=model, kwargs={"input_ids": zeros(batch, 512)}, loss=next_word_loss
    )


def _vision(kind: str, config: str, batch: int, **settings: Any) -> Case:
    model = made(kind, config, num_labels=1000, **settings)
    return Case(model=model, kwargs={"pixel_values": images(batch)}, loss=class_loss)


def _network(build: Callable[[], nn.Module], batch: int, **settings: Any) -> Case:
    return Case(
        model=on_meta(build), args=(images(batch),), loss=class_loss, **settings
    )


def _t5() -> Case:
    model = made(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=768,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        use_cache=False,
        attn_implementation="eager",
    )
    ids = {"input_ids": zeros(16, 512), "decoder_input_ids": zeros(16, 128)}
    return Case(model=model, kwargs=ids, loss=next_word_loss)


def _whisper() -> Case:
    model = made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        use_cache=False,
    )
    given = {
        "input_features": zeros(16, 80, 3000, dtype=torch.float32),
        "decoder_input_ids": zeros(16, 128),
    }
    return Case(model=model, kwargs=given, loss=next_word_loss)


CASES: dict[str, Callable[[], Case]] = {
    "GPT-2 (124M), 1024 tokens": lambda: _gpt2(12, 768, 12, 32),
    "GPT-2 medium (355M), 1024 tokens": lambda: _gpt2(24, 1024, 16, 16),
    "GPT-2 XL (1.6B), 1024 tokens": lambda: _gpt2(48, 1600, 25, 4),
    "Llama (1.1B), 2048 tokens": lambda: _llama(
        4,
        2048,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    ),
    "Llama (3.2B), 2048 tokens": lambda: _llama(
        2,
        2048,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "BERT base (110M), 512 tokens": lambda: _encoder(
        "BertForMaskedLM", "BertConfig", 32
    ),
    "BERT large (340M), 512 tokens": lambda: _encoder(
        "BertForMaskedLM",
        "BertConfig",
        16,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "RoBERTa base (125M), 512 tokens": lambda: _encoder(
        "RobertaForMaskedLM",
        "RobertaConfig",
        32,
        vocab_size=50265,
        max_position_embeddings=514,
    ),
    "T5 base (220M), 512 and 128 tokens": _t5,
    "Whisper small (240M), 30 s": _whisper,
    "ViT-B/16": lambda: _vision("ViTForImageClassification", "ViTConfig", 128),
    "ViT-L/16": lambda: _vision(
        "ViTForImageClassification",
        "ViTConfig",
        64,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "Swin-T": lambda: _vision(
        "SwinForImageClassification", "SwinConfig", 128, attn_implementation="eager"
    ),
    "ConvNeXt-T": lambda: _vision(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        128,
        attn_implementation="eager",
    ),
    "ResNet-50": lambda: _network(lambda: ResNet(RESNET50_BLOCKS), 256),
    "ResNet-101": lambda: _network(lambda: ResNet(RESNET101_BLOCKS), 256),
    "ResNet-152": lambda: _network(lambda: ResNet(RESNET152_BLOCKS), 256),
    "VGG-19": lambda: _network(VGG, 128),
    "DenseNet-121": lambda: _network(lambda: DenseNet(DENSENET121_LAYERS), 128),
    "U-Net, 572 pixels": lambda: Case(
        model=on_meta(UNet),
        args=(images(4, 572),),
        loss=pixel_loss,
    ),
}


def study_devices(names: Sequence[str]) -> None:
    """Compare each case on every device, and record a line."""
    for name in names or CASES:
        begin = time.perf_counter()
        try:
            compared = CASES[name]().compared(
                hardware_names(), time_limit=SECONDS, finds_largest_batch=False
            )
            line = compared.summary()
        except remat.RematError as error:
            line = {"failed": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - begin, 1)
        print(name, seconds, line.get("failed", ""), flush=True)
        append(
            FILE,
            {
                **environment(),
                "study": "devices",
                "case": name,
                "model": name,
                **line,
                "seconds": seconds,
            },
        )


# --- published memory ---------------------------------------------------


class Segmenter(nn.Module):
    """FCN on a dilated residual network with an auxiliary head, as mmsegmentation's.

    ``ResNetV1c`` with a stem of three convolutions; strides 1, 2, 1, 1 and dilations
    1, 1, 2, 4, of which a stage's first block has half.
    """

    def __init__(
        self, blocks: tuple[int, ...], *, is_deep: bool, classes: int = 19
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_unit(3, 32, 2), *_unit(32, 32), *_unit(32, 64), nn.MaxPool2d(3, 2, 1)
        )
        stages: list[nn.Module] = []
        channels, times = 64, 4 if is_deep else 1
        plan = zip(blocks, (1, 2, 1, 1), (1, 1, 2, 4), strict=True)
        for stage, (count, stride, dilation) in enumerate(plan):
            layers: list[nn.Module] = []
            for block in range(count):
                first = block == 0
                spread = dilation // 2 if first and dilation > 1 else dilation
                inner = 64 << stage
                layers.append(
                    Residual(
                        channels,
                        inner,
                        inner * times,
                        stride if first else 1,
                        spread,
                        is_deep=is_deep,
                    )
                )
                channels = inner * times
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        width, last = (512 if is_deep else 128), channels
        self.convs = nn.Sequential(*_unit(last, width), *_unit(width, width))
        self.joined = nn.Sequential(*_unit(last + width, width))
        self.scores = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1))
        self.auxiliary = nn.Sequential(
            *_unit(last // 2, width // 2),
            nn.Dropout2d(0.1),
            nn.Conv2d(width // 2, classes, 1),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = self.stem(images)
        maps: list[Tensor] = []
        for stage in self.stages:
            h = stage(h)
            maps.append(h)
        joined = torch.cat([h, self.convs(h)], 1)
        scores = self.scores(self.joined(joined))
        auxiliary = self.auxiliary(maps[2])
        return self._loss(scores, labels) + 0.4 * self._loss(auxiliary, labels)

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        whole = functional.interpolate(scores, labels.shape[1:], mode="bilinear")
        losses = functional.cross_entropy(whole, labels, reduction="none")
        return losses.mean()


class Residual(nn.Module):
    """A residual block, of two convolutions or, deep, of three."""

    def __init__(
        self,
        channels: int,
        inner: int,
        out: int,
        stride: int,
        spread: int,
        *,
        is_deep: bool,
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm2d
        layers: list[nn.Module] = []
        if is_deep:
            layers += _unit(channels, inner, side=1)
            layers += _unit(inner, inner, stride, spread)
            layers += [nn.Conv2d(inner, out, 1, bias=False), norm(out)]
        else:
            layers += _unit(channels, inner, stride, spread)
            layers += [nn.Conv2d(inner, out, 3, 1, 1, bias=False), norm(out)]
        self.layers = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), norm(out)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layers(x) + self.shortcut(x))


def _unit(
    channels: int, out: int, stride: int = 1, spread: int = 1, *, side: int = 3
) -> list[nn.Module]:
    padding = spread * (side // 2)
    return [
        nn.Conv2d(channels, out, side, stride, padding, spread, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    ]


def _segmented(
    blocks: tuple[int, ...],
    height: int,
    width: int,
    *,
    is_deep: bool = True,
    autocast: torch.dtype | None = None,
) -> Case:
    return Case(
        model=on_meta(lambda: Segmenter(blocks, is_deep=is_deep)),
        args=(images(2, height, width), zeros(2, height, width)),
        optimizer=functools.partial(
            torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False
        ),
        autocast=autocast,
    )


def _bert_large(autocast: torch.dtype | None, optimizer: Any) -> Case:
    model = made(
        "BertForSequenceClassification",
        "BertConfig",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    # Up to version 2 of PyTorch gradients were set to zero, and stayed.
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return Case(
        model=model,
        kwargs={"input_ids": zeros(4, 512)},
        loss=class_loss,
        optimizer=optimizer,
        autocast=autocast,
    )


_PLAIN_ADAM = functools.partial(torch.optim.AdamW, foreach=False)
_ADAFACTOR = functools.partial(
    transformers.Adafactor, scale_parameter=False, relative_step=False, lr=5e-5
)
_ANATOMY = "Hugging Face, Efficient training on a single GPU (V100 of 16 GB)"
_SEGMENTATION = "mmsegmentation, configs/fcn/README.md, Cityscapes, batch of 2"
_KERNELS_MIB = 1343
"""What a process took before its first tensor there: counted in these numbers."""

PUBLISHED: dict[str, tuple[Callable[[], Case], float, float, str]] = {
    "BERT large, batch of 4": (
        lambda: _bert_large(None, _PLAIN_ADAM),
        14949 * MIB,
        _KERNELS_MIB * MIB,
        _ANATOMY,
    ),
    "BERT large, float16": (
        lambda: _bert_large(torch.float16, _PLAIN_ADAM),
        13939 * MIB,
        _KERNELS_MIB * MIB,
        _ANATOMY,
    ),
    "BERT large, Adafactor": (
        lambda: _bert_large(None, _ADAFACTOR),
        12295 * MIB,
        _KERNELS_MIB * MIB,
        _ANATOMY,
    ),
    "FCN R-18-D8, 512 x 1024": (
        lambda: _segmented((2, 2, 2, 2), 512, 1024, is_deep=False),
        1.7 * GIB,
        0,
        _SEGMENTATION,
    ),
    "FCN R-50-D8, 512 x 1024": (
        lambda: _segmented((3, 4, 6, 3), 512, 1024),
        5.7 * GIB,
        0,
        _SEGMENTATION,
    ),
    "FCN R-101-D8, 512 x 1024": (
        lambda: _segmented((3, 4, 23, 3), 512, 1024),
        9.2 * GIB,
        0,
        _SEGMENTATION,
    ),
    "FCN R-101-D8, float16": (
        lambda: _segmented((3, 4, 23, 3), 512, 1024, autocast=torch.float16),
        5.37 * GIB,
        0,
        _SEGMENTATION,
    ),
    "FCN R-50-D8, 769 x 769": (
        lambda: _segmented((3, 4, 6, 3), 769, 769),
        6.5 * GIB,
        0,
        _SEGMENTATION,
    ),
}
"""What was published: the step, bytes, bytes of these outside of tensors, source."""


def study_memory(names: Sequence[str]) -> None:
    """Predict what was published of memory; any card will do that holds it."""
    for name in names or PUBLISHED:
        build, published, outside, source = PUBLISHED[name]
        (found,) = build().compared(["h200"], finds_largest_batch=False).estimates
        line = {
            "published_bytes": round(published),
            "outside_bytes": round(outside),
            "source": source,
            "plain_peak_bytes": found.plain_peak_bytes,
            "least_peak_bytes": found.least_peak_bytes,
        }
        peaks = (found.least_peak_bytes, found.plain_peak_bytes)
        low, high = ((peak + outside) / published - 1 for peak in peaks)
        print(
            name, format_bytes(round(published)), f"{low:+.1%} {high:+.1%}", flush=True
        )
        append(
            FILE,
            {**environment(), "study": "memory", "case": name, "model": name, **line},
        )


# --- published times ----------------------------------------------------


def _timm(kind: str, config: str, batch: int, **settings: Any) -> Case:
    case = _vision(kind, config, batch, attn_implementation="eager", **settings)
    return Case(
        model=case.model,
        kwargs=case.kwargs,
        loss=class_loss,
        optimizer=_SGD,
        autocast=torch.float16,
    )


_SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_VIT = ("ViTForImageClassification", "ViTConfig")


def _timm_network(build: Callable[[], nn.Module], batch: int) -> Case:
    return _network(build, batch, optimizer=_SGD, autocast=torch.float16)


def _basic(depths: list[int], batch: int) -> Case:
    return _timm(
        "ResNetForImageClassification",
        "ResNetConfig",
        batch,
        depths=depths,
        layer_type="basic",
        hidden_sizes=[64, 128, 256, 512],
        embedding_size=64,
    )


TIMES: dict[str, tuple[Callable[[], Case], float]] = {
    "resnet18": (lambda: _basic([2, 2, 2, 2], 512), 184.877),
    "resnet34": (lambda: _basic([3, 4, 6, 3], 512), 314.992),
    "resnet50": (lambda: _timm_network(lambda: ResNet(RESNET50_BLOCKS), 512), 618.983),
    "densenet121": (
        lambda: _timm_network(lambda: DenseNet(DENSENET121_LAYERS, dropout=0.0), 256),
        348.758,
    ),
    "vgg11": (lambda: _timm_network(lambda: VGG((1, 1, 2, 2, 2)), 512), 619.706),
    "vit_tiny_patch16_224": (
        lambda: _timm(
            *_VIT,
            512,
            hidden_size=192,
            num_attention_heads=3,
            intermediate_size=768,
            hidden_dropout_prob=0.0,
        ),
        222.408,
    ),
    "vit_small_patch16_224": (
        lambda: _timm(
            *_VIT, 384, hidden_size=384, num_attention_heads=6, intermediate_size=1536
        ),
        363.872,
    ),
    "vit_base_patch32_224": (lambda: _timm(*_VIT, 512, patch_size=32), 299.695),
    "convnext_tiny": (
        lambda: _timm("ConvNextForImageClassification", "ConvNextConfig", 256),
        313.859,
    ),
    "swin_tiny_patch4_window7_224": (
        lambda: _timm(
            "SwinForImageClassification", "SwinConfig", 256, drop_path_rate=0.0
        ),
        394.841,
    ),
}
"""Steps, and their published milliseconds."""

FITTED = ("resnet18", "vit_tiny_patch16_224", "vit_base_patch32_224")
"""What the shares of GeForce cards were fitted on."""

TIMES_SOURCE = (
    "pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
)


def study_time(names: Sequence[str]) -> None:
    """Predict published times of steps on an RTX 3090."""
    for name in names or TIMES:
        build, published_ms = TIMES[name]
        (found,) = build().compared(["rtx-3090"], finds_largest_batch=False).estimates
        predicted_ns = found.plain_ns + found.optimizer_ns
        print(
            name,
            published_ms,
            f"{predicted_ns / 1e6 / published_ms - 1:+.1%}",
            flush=True,
        )
        append(
            FILE,
            {
                **environment(),
                "study": "time",
                "case": name,
                "model": name,
                "published_ns": round(published_ms * 1e6),
                "predicted_ns": predicted_ns,
                "source": TIMES_SOURCE,
            },
        )


# --- this CPU -----------------------------------------------------------


def this_cpu() -> Hardware:
    """Return this machine as a device, with measured rates, for one thread."""
    torch.set_num_threads(1)
    rates = measure_rates("cpu")
    rates_of = {"float32": rates.flops_per_s}
    return Hardware(
        name="this-cpu",
        title="this machine",
        kind="cpu",
        memory_bytes=64 * GIB,
        context_bytes=0,
        bytes_per_s=rates.bytes_per_s,
        link_bytes_per_s=rates.bytes_per_s,
        l2_bytes=0,
        launch_ns=rates.launch_ns,
        resident_threads=0,
        flops_per_s=rates_of,
        percent=dict.fromkeys(CLASSES, 100),
        sources=dict.fromkeys(
            numbers_of(rates_of), "remat.profile.estimate.measure_rates, here"
        ),
    )


def study_cpu(names: Sequence[str]) -> None:
    """Predict peaks and times of the study models, beside what was measured of them."""
    cpu = this_cpu()
    lines = read(RESULTS / "budgets.jsonl")
    peaks = {
        line["model"]: line["plain_peak_bytes"]
        for line in lines
        if line.get("plain_peak_bytes") and line["case"] == "plain"
    }
    times = {
        line["model"]: line["baseline_cost_ns"]
        for line in lines
        if line.get("baseline_cost_ns")
    }
    for name in names or MODELS:
        if name not in peaks or name not in times:
            continue
        work = MODELS[name]()
        compared = remat.compare_devices(
            work.model,
            work.args,
            work.kwargs,
            devices=[cpu],
            loss=work.loss,
            optimizer=work.make_optimizer(work.model),
            finds_largest_batch=False,
        )
        (found,) = compared.estimates
        line = {
            "measured_peak_bytes": peaks[name],
            "measured_ns": times[name],
            "plain_peak_bytes": found.plain_peak_bytes,
            "plain_ns": found.plain_ns,
        }
        print(
            name,
            f"{found.plain_peak_bytes / peaks[name] - 1:+.1%}",
            f"{found.plain_ns / times[name] - 1:+.1%}",
            flush=True,
        )
        append(
            FILE, {**environment(), "study": "cpu", "case": name, "model": name, **line}
        )


# --- tables -----------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def newest(study: str) -> list[dict[str, Any]]:
    """Return the last line of each case of a study, in the order of the cases."""
    order = {"devices": CASES, "memory": PUBLISHED, "time": TIMES, "cpu": MODELS}[study]
    lines = [line for line in read(FILE) if line["study"] == study]
    last = {line["case"]: line for line in lines}
    return [last[name] for name in order if name in last]


def devices_table() -> str:
    """Return which models fit on which devices, and in what time."""
    rows: list[list[str]] = []
    for line in newest("devices"):
        found = {each["device"]: each for each in line.get("devices", ())}
        if not found:
            rows.append([line["case"], line["failed"]])
            continue
        first = next(iter(found.values()))
        cells = [
            format_ns(each["step_ns"]) + (", remat" if each["fits"] != "yes" else "")
            if each["step_ns"] is not None
            else "no"
            for each in (found[name] for name in hardware_names())
        ]
        peak = format_bytes(first["plain_peak_bytes"])
        rows.append([line["case"], str(line["batch"]), peak, *cells])
    return table(["model", "batch", "peak", *hardware_names()], rows)


def memory_table() -> str:
    """Return predictions beside what was published of memory."""
    rows: list[list[str]] = []
    for line in newest("memory"):
        published = line["published_bytes"] - line["outside_bytes"]
        low, high = line["least_peak_bytes"], line["plain_peak_bytes"]
        rows.append(
            [
                line["case"],
                format_bytes(published),
                f"{format_bytes(low)} to {format_bytes(high)}",
                f"{low / published - 1:+.1%} to {high / published - 1:+.1%}",
                line["source"],
            ]
        )
    return table(["step", "published", "predicted", "error", "source"], rows)


def time_table() -> str:
    """Return predictions beside published times of steps."""
    rows = [
        [
            line["case"] + (" (fitted)" if line["case"] in FITTED else ""),
            format_ns(line["published_ns"]),
            format_ns(line["predicted_ns"]),
            f"{line['predicted_ns'] / line['published_ns'] - 1:+.1%}",
        ]
        for line in newest("time")
    ]
    return table(["model", "published", "predicted", "error"], rows)


def cpu_table() -> str:
    """Return predictions beside what was measured on this CPU."""
    rows = [
        [
            line["case"],
            format_bytes(line["measured_peak_bytes"]),
            f"{line['plain_peak_bytes'] / line['measured_peak_bytes'] - 1:+.1%}",
            format_ns(line["measured_ns"]),
            f"{line['plain_ns'] / line['measured_ns'] - 1:+.1%}",
        ]
        for line in newest("cpu")
    ]
    return table(["model", "measured peak", "error", "measured time", "error"], rows)


TABLES = {
    "devices": devices_table,
    "published memory": memory_table,
    "published times": time_table,
    "this CPU": cpu_table,
}


def write_tables() -> None:
    """Write all tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        page = fill_place(page, name, make())
    PAGE.write_text(page, encoding="utf-8")


STUDIES = {
    "devices": study_devices,
    "memory": study_memory,
    "time": study_time,
    "cpu": study_cpu,
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", nargs="?", choices=STUDIES)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.study is not None:
        STUDIES[options.study](options.names)
    if options.tables:
        write_tables()


if __name__ == "__main__":
    main()
