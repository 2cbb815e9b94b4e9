"""The models of every study: random weights, sized for two CPU cores.

Each entry of :data:`MODELS` builds a :class:`Workload`: one training step of a model in
training mode with dropout active. At ``scale=1`` the widths are a fraction of the
published ones, so that activations rather than parameters make up the peak and a step
takes about a second on one core. ``scale`` multiplies widths, and batch or pixels,
alike, hence activations and parameters by its square: 4 gives the published width (2
for DenseNet-121). ``tiny`` keeps what makes each model hard to capture but not its
depth, for tests.

ResNet-50, ResNet-152, VGG-19, DenseNet-161, GoogLeNet, U-Net and PSPNet are the
networks of [1]_: ``scale=4`` gives width, image and batch of its experiments, for a
GPU, and ``scale=1`` a quarter of the width and of the pixels in a batch, so that
parameters have about the same share of the peak as there.

Images and convolutions are in the channels-last layout, in which the CPU's kernels work
in place. In the other layout each convolution copies what it reads and writes into a
layout of its own, and the copies, not the activations, are then the largest part of the
smallest budget.

Nothing is downloaded: configurations are written here and weights drawn at random.

References
----------
.. [1] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019.
"""

import functools
import math
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Random weights need no network; without this a look-up for optional kernels does.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from studies.networks import (
    DENSENET161_LAYERS,
    GOOGLENET_INCEPTIONS,
    RESNET152_BLOCKS,
    VGG,
    DenseNet,
    GoogLeNet,
    PSPNet,
    ResNet,
    UNet,
    unet_output_side,
)

DROPOUT = 0.1
VOCABULARY = 1024
N_CLASSES = 100

Criterion = Callable[[Any, Tensor], Tensor]
"""From outputs and labels to a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How large a model is and how its step is written.

    Parameters
    ----------
    tiny
        Whether to build the small variant for tests; ``scale`` is then ignored.
    scale
        Multiplier of widths, and of batch or pixels, at least 1.
    is_loss_inside
        Whether the model takes the labels and returns the loss itself.
    attention
        ``"sdpa"`` (fused attention) or ``"eager"`` (matrix products and softmax).
    device
        Where parameters and batch live.
    seed
        Seed of parameters and batch; the global generators are left as they were.
    """

    tiny: bool = False
    scale: int = 1
    is_loss_inside: bool = False
    attention: str = "sdpa"
    device: str = "cpu"
    seed: int = 0


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step: a model, its batch, its loss and its optimizer.

    Parameters
    ----------
    name
        Key in :data:`MODELS`.
    model
        In training mode.
    args, kwargs
        The batch, as the model takes it.
    loss
        From the model's outputs to a scalar, or ``None`` where the model returns it.
    make_optimizer
        From the model to the optimizer it is usually trained with.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    loss: Callable[[Any], Tensor] | None
    make_optimizer: Callable[[nn.Module], Optimizer]

    def training_loss(self, model: nn.Module | None = None) -> Tensor:
        """Run the forward pass and return the scalar loss.

        Parameters
        ----------
        model
            What to call instead of ``self.model``, such as a compiled version of it.
        """
        called = self.model if model is None else model
        outputs = called(*self.args, **self.kwargs)
        return outputs if self.loss is None else self.loss(outputs)


class LossInside(nn.Module):
    """A model together with its loss on the labels it is given.

    Parameters
    ----------
    model
        Called with everything but the labels.
    criterion
        From outputs and labels to a scalar.
    """

    def __init__(self, model: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        return self.criterion(self.model(*args, **kwargs), labels)


def classification_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Average the cross-entropy of one class per row (or per pixel)."""
    return functional.cross_entropy(_logits(outputs), labels)


def auxiliary_loss(
    outputs: tuple[Tensor, ...], labels: Tensor, *, weight: float
) -> Tensor:
    """Add the weighted losses of auxiliary scores to the loss of the first scores."""
    scores, *auxiliary = outputs
    loss = functional.cross_entropy(scores, labels)
    for other in auxiliary:
        loss = loss + weight * functional.cross_entropy(other, labels)
    return loss


def token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Average the cross-entropy of every position's own token."""
    return functional.cross_entropy(_logits(outputs).flatten(0, 1), labels.flatten())


def next_token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Average the cross-entropy of every position's following token."""
    logits = _logits(outputs)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def resnet50(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build ResNet-50 (batch normalisation, in-place activations, shortcuts)."""
    return _classifier(
        "resnet50",
        options,
        batch=24,
        tiny=lambda: ResNet((1, 2), width=8, n_classes=N_CLASSES),
        full=lambda scale: ResNet(width=16 * scale, n_classes=250 * scale),
    )


def resnet152(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build ResNet-152 (the same, three times as deep)."""
    return _classifier(
        "resnet152",
        options,
        batch=12,
        tiny=lambda: ResNet((1, 3), width=8, n_classes=N_CLASSES),
        full=lambda scale: ResNet(
            RESNET152_BLOCKS, width=16 * scale, n_classes=250 * scale
        ),
    )


def vgg19(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build VGG-19 (a plain chain of convolutions, dropout with p = 0.5)."""
    return _classifier(
        "vgg19",
        options,
        batch=16,
        tiny=lambda: VGG((1, 1), width=8, image=32, hidden=16, n_classes=N_CLASSES),
        full=lambda scale: VGG(
            width=16 * scale, hidden=1024 * scale, n_classes=250 * scale
        ),
    )


def densenet121(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build DenseNet-121 (concatenations that hold every earlier layer)."""
    with _seeded(options.seed):
        if options.tiny:
            model = DenseNet((2, 2), growth=4, n_classes=N_CLASSES, dropout=DROPOUT)
            return _images("densenet121", model, options, _Batch(2, 32))
        model = DenseNet(
            growth=16 * options.scale, n_classes=N_CLASSES, dropout=DROPOUT
        )
        return _images("densenet121", model, options, _Batch(10 * options.scale, 112))


def densenet161(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build DenseNet-161 (the same, wider and deeper, without dropout)."""
    return _classifier(
        "densenet161",
        options,
        batch=8,
        tiny=lambda: DenseNet((2, 2), growth=4, n_classes=N_CLASSES, dropout=0.0),
        full=lambda scale: DenseNet(
            DENSENET161_LAYERS, growth=12 * scale, n_classes=250 * scale, dropout=0.0
        ),
    )


def googlenet(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build GoogLeNet (parallel branches, two auxiliary classifiers in the loss)."""
    first, middle, last = GOOGLENET_INCEPTIONS
    return _classifier(
        "googlenet",
        options,
        batch=64,
        tiny=lambda: GoogLeNet(
            (first[:1], middle[:3], last[:1]), width=8, n_classes=N_CLASSES
        ),
        full=lambda scale: GoogLeNet(width=16 * scale, n_classes=250 * scale),
        criterion=functools.partial(auxiliary_loss, weight=0.3),
    )


def unet(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build a U-Net (skips that live from the first layers to the last)."""
    with _seeded(options.seed):
        if options.tiny:
            depth, count, side = 2, 2, 44
            model = UNet(depth=depth, width=4)
        else:
            # Unpadded convolutions want four pixels less than a multiple of 16.
            depth, count = 4, 8
            side = 16 * round(18 * math.sqrt(options.scale)) - 4
            model = UNet(width=16 * options.scale)
        batch = _Batch(count, side, 2, label_side=unet_output_side(side, depth))
        return _images("unet", model, options, batch)


def pspnet(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build PSPNet (dilated convolutions, a pyramid, an auxiliary classifier)."""
    n_classes = 17
    with _seeded(options.seed):
        if options.tiny:
            side = 33
            model = PSPNet((1, 1, 1, 1), width=4, n_classes=n_classes)
        else:
            side = 1 + round(356 * math.sqrt(options.scale))
            model = PSPNet(width=16 * options.scale, n_classes=n_classes)
        batch = _Batch(2, side, n_classes, label_side=side)
        criterion = functools.partial(auxiliary_loss, weight=0.4)
        return _images("pspnet", model, options, batch, criterion)


def gpt2(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build GPT-2 with 12 layers (causal attention, tied embeddings)."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, length = _transformer_size(options, n_layers=12)
    with _seeded(options.seed):
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=length,
            n_embd=width,
            n_layer=n_layers,
            n_head=width // 16 if options.tiny else 6,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation=options.attention,
        )
        model = transformers.GPT2LMHeadModel(config)
        tokens = _tokens(batch, length)
        inputs = {"input_ids": tokens}
        return _text("gpt2", model, inputs, tokens, next_token_loss, options)


def bert(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build BERT with 12 layers (masked language model, padded batch)."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, length = _transformer_size(options, n_layers=12)
    with _seeded(options.seed):
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=n_layers,
            num_attention_heads=width // 16 if options.tiny else 6,
            intermediate_size=4 * width,
            max_position_embeddings=length,
            attn_implementation=options.attention,
        )
        model = transformers.BertForMaskedLM(config)
        inputs = {
            "input_ids": _tokens(batch, length),
            "attention_mask": _padding_mask(batch, length),
        }
        labels = _tokens(batch, length)
        return _text("bert", model, inputs, labels, token_loss, options)


def vit(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build a vision transformer with 12 layers."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, _ = _transformer_size(options, n_layers=12)
    with _seeded(options.seed):
        side, patch = (16, 4) if options.tiny else (128, 8)
        config = transformers.ViTConfig(
            hidden_size=width,
            num_hidden_layers=n_layers,
            num_attention_heads=width // 16 if options.tiny else 6,
            intermediate_size=4 * width,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
            image_size=side,
            patch_size=patch,
            num_labels=N_CLASSES,
            problem_type="single_label_classification",
            attn_implementation=options.attention,
        )
        model = transformers.ViTForImageClassification(config)
        inputs = {"pixel_values": torch.randn(batch, 3, side, side)}
        labels = torch.randint(N_CLASSES, (batch,))
        return _text("vit", model, inputs, labels, classification_loss, options)


def t5(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build T5 with 6 + 6 layers (an encoder's output used by every decoder layer)."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, length = _transformer_size(options, n_layers=6)
    with _seeded(options.seed):
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=width,
            d_kv=16 if options.tiny else width // 6,
            d_ff=4 * width,
            num_layers=n_layers,
            num_heads=width // 16 if options.tiny else 6,
            dropout_rate=DROPOUT,
            use_cache=False,
            decoder_start_token_id=0,
            attn_implementation=options.attention,
        )
        model = transformers.T5ForConditionalGeneration(config)
        inputs = {
            "input_ids": _tokens(batch, length),
            "attention_mask": _padding_mask(batch, length),
            "decoder_input_ids": _tokens(batch, length),
        }
        labels = _tokens(batch, length)
        return _text("t5", model, inputs, labels, token_loss, options)


def llama(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build Llama with 16 layers (rotary positions, grouped keys and values)."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, length = _transformer_size(options, n_layers=16)
    with _seeded(options.seed):
        n_heads = width // 16 if options.tiny else 6
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=n_layers,
            num_attention_heads=n_heads,
            num_key_value_heads=n_heads // 2,
            max_position_embeddings=length,
            attention_dropout=DROPOUT,
            use_cache=False,
            attn_implementation=options.attention,
        )
        model = transformers.LlamaForCausalLM(config)
        tokens = _tokens(batch, length)
        inputs = {"input_ids": tokens}
        return _text("llama", model, inputs, tokens, next_token_loss, options)


def mamba(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build Mamba with 4 layers (a recurrence unrolled over 32 positions)."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, length = _transformer_size(options, n_layers=4)
    with _seeded(options.seed):
        config = transformers.MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            state_size=8,
            num_hidden_layers=n_layers,
            use_cache=False,
            # With the default the model runs another algorithm when it is compiled
            # (a parallel scan) than when it is not (a loop), hence other last digits.
            use_associative_scan=False,
        )
        model = transformers.MambaForCausalLM(config)
        # Unrolling costs ops, not bytes: a short sequence and a large batch keep the
        # graph within reach of every solver and the activations above the parameters.
        tokens = _tokens(batch if options.tiny else 8 * batch, min(length, 32))
        inputs = {"input_ids": tokens}
        return _text("mamba", model, inputs, tokens, next_token_loss, options)


def mamba2(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build Mamba-2 with 12 layers (a recurrence computed in chunks)."""
    import transformers  # noqa: PLC0415 - networks need none

    n_layers, width, batch, length = _transformer_size(options, n_layers=12)
    with _seeded(options.seed):
        head_dim = 16
        config = transformers.Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            head_dim=head_dim,
            num_heads=2 * width // head_dim,
            state_size=16,
            n_groups=2,
            chunk_size=8 if options.tiny else 32,
            num_hidden_layers=n_layers,
            use_cache=False,
        )
        model = transformers.Mamba2ForCausalLM(config)
        tokens = _tokens(batch, length)
        inputs = {"input_ids": tokens}
        return _text("mamba2", model, inputs, tokens, next_token_loss, options)


MODELS: dict[str, Callable[..., Workload]] = {
    "resnet50": resnet50,
    "vgg19": vgg19,
    "unet": unet,
    "densenet121": densenet121,
    "resnet152": resnet152,
    "densenet161": densenet161,
    "googlenet": googlenet,
    "pspnet": pspnet,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "llama": llama,
    "mamba": mamba,
    "mamba2": mamba2,
}


@contextmanager
def _seeded(seed: int) -> Generator[None, None, None]:
    """Seed the global CPU generator for the length of a block."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def _transformer_size(options: Options, *, n_layers: int) -> tuple[int, int, int, int]:
    """Return layers, width, batch and sequence length."""
    if options.tiny:
        return 2, 32, 2, 16
    return n_layers, 192 * options.scale, 4 * options.scale, 256


def _tokens(batch: int, length: int) -> Tensor:
    """Draw token identifiers; 0 and 1 are left to padding and ends."""
    return torch.randint(2, VOCABULARY, (batch, length))


def _padding_mask(batch: int, length: int) -> Tensor:
    """Mask the last quarter of the last row."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, -(length // 4) :] = 0
    return mask


def _logits(outputs: Any) -> Tensor:
    """Return the scores of a plain network or of a transformers output."""
    return outputs if isinstance(outputs, Tensor) else outputs.logits


@dataclass(frozen=True)
class _Batch:
    """Random images; with ``label_side`` one label a pixel, else one an image."""

    count: int
    side: int
    n_classes: int = N_CLASSES
    label_side: int | None = None


def _classifier(
    name: str,
    options: Options,
    *,
    batch: int,
    tiny: Callable[[], nn.Module],
    full: Callable[[int], nn.Module],
    criterion: Criterion = classification_loss,
) -> Workload:
    """Build a network that classifies images of 224 pixels, or its tiny variant.

    ``full`` makes the network from the scale, with 250 classes times the scale.
    """
    scale = options.scale
    with _seeded(options.seed):
        if options.tiny:
            return _images(name, tiny(), options, _Batch(2, 32), criterion)
        images = _Batch(batch * scale, 224, 250 * scale)
        return _images(name, full(scale), options, images, criterion)


def _images(
    name: str,
    model: nn.Module,
    options: Options,
    batch: _Batch,
    criterion: Criterion = classification_loss,
) -> Workload:
    """Add a batch of random images, a loss and momentum SGD to a network."""
    images = torch.randn(batch.count, 3, batch.side, batch.side)
    side = batch.label_side
    shape = (batch.count,) if side is None else (batch.count, side, side)
    return _workload(
        name,
        model.to(memory_format=torch.channels_last),
        {"x": images.contiguous(memory_format=torch.channels_last)},
        torch.randint(batch.n_classes, shape),
        criterion,
        options,
        lambda module: SGD(module.parameters(), lr=0.01, momentum=0.9),
    )


def _text(
    name: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    labels: Tensor,
    criterion: Criterion,
    options: Options,
) -> Workload:
    """Add a loss and AdamW to a transformer."""
    return _workload(
        name,
        model,
        inputs,
        labels,
        criterion,
        options,
        lambda module: AdamW(module.parameters(), lr=1e-4),
    )


def _workload(
    name: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    labels: Tensor,
    criterion: Criterion,
    options: Options,
    make_optimizer: Callable[[nn.Module], Optimizer],
) -> Workload:
    """Put the parts on the device, the loss inside or outside."""
    device = torch.device(options.device)
    model.train()
    kwargs = {key: value.to(device) for key, value in inputs.items()}
    labels = labels.to(device)
    if options.is_loss_inside:
        model = LossInside(model, criterion)
        kwargs["labels"] = labels
    return Workload(
        name=name,
        model=model.to(device),
        kwargs=kwargs,
        loss=None
        if options.is_loss_inside
        else lambda outputs: criterion(outputs, labels),
        make_optimizer=make_optimizer,
    )
