"""The models of every study: random weights, sized for two CPU cores.

Each entry of :data:`MODELS` builds a :class:`Workload`: one training step of a model in
training mode with dropout active. At ``scale=1`` the widths are a fraction of the
published ones, so that activations rather than parameters make up the peak and a step
takes about a second on two cores. ``scale`` multiplies widths and batch alike, hence
activations and parameters by its square: 2 gives the published width of the
convolutional networks, 4 that of the transformers. ``tiny`` keeps what makes each
model hard to capture but not its depth, for tests.

Nothing is downloaded: configurations are written here and weights drawn at random.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Random weights need no network; without this a look-up for optional kernels does.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from studies.networks import VGG, DenseNet, ResNet, UNet

DROPOUT = 0.1
VOCABULARY = 1024
N_CLASSES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How large a model is and how its step is written.

    Parameters
    ----------
    tiny
        Whether to build the small variant for tests; ``scale`` is then ignored.
    scale
        Multiplier of widths and batch, at least 1.
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

    def __init__(
        self, model: nn.Module, criterion: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        return self.criterion(self.model(*args, **kwargs), labels)


def classification_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Average the cross-entropy of one class per row (or per pixel)."""
    return functional.cross_entropy(_logits(outputs), labels)


def token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Average the cross-entropy of every position's own token."""
    return functional.cross_entropy(_logits(outputs).flatten(0, 1), labels.flatten())


def next_token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Average the cross-entropy of every position's following token."""
    logits = _logits(outputs)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def resnet50(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build ResNet-50 (batch normalisation, in-place activations, shortcuts)."""
    with _seeded(options.seed):
        if options.tiny:
            model = ResNet((1, 2), width=8, n_classes=N_CLASSES)
            return _images("resnet50", model, options, batch=2, side=32)
        model = ResNet(width=32 * options.scale, n_classes=N_CLASSES)
        return _images("resnet50", model, options, batch=12 * options.scale, side=128)


def vgg19(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build VGG-19 (a plain chain of convolutions, dropout with p = 0.5)."""
    with _seeded(options.seed):
        if options.tiny:
            model = VGG((1, 1), width=8, image=16, hidden=16, n_classes=N_CLASSES)
            return _images("vgg19", model, options, batch=2, side=16)
        model = VGG(
            width=16 * options.scale,
            image=128,
            hidden=512 * options.scale,
            n_classes=N_CLASSES,
        )
        return _images("vgg19", model, options, batch=24 * options.scale, side=128)


def unet(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build a U-Net (skips that live from the first layers to the last)."""
    with _seeded(options.seed):
        if options.tiny:
            model = UNet(depth=2, width=4, dropout=DROPOUT)
            return _images("unet", model, options, batch=2, side=16, per_pixel=True)
        model = UNet(width=16 * options.scale, dropout=DROPOUT)
        return _images(
            "unet", model, options, batch=4 * options.scale, side=160, per_pixel=True
        )


def densenet121(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build DenseNet-121 (concatenations that hold every earlier layer)."""
    with _seeded(options.seed):
        if options.tiny:
            model = DenseNet((2, 2), growth=4, n_classes=N_CLASSES, dropout=DROPOUT)
            return _images("densenet121", model, options, batch=2, side=32)
        model = DenseNet(
            growth=16 * options.scale, n_classes=N_CLASSES, dropout=DROPOUT
        )
        return _images(
            "densenet121", model, options, batch=10 * options.scale, side=112
        )


def gpt2(options: Options = DEFAULT_OPTIONS) -> Workload:
    """Build GPT-2 with 12 layers (causal attention, tied embeddings)."""
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


def _images(
    name: str,
    model: nn.Module,
    options: Options,
    *,
    batch: int,
    side: int,
    per_pixel: bool = False,
) -> Workload:
    """Add a batch of random images, a loss and momentum SGD to a network."""
    images = torch.randn(batch, 3, side, side)
    labels = torch.randint(
        2 if per_pixel else N_CLASSES,
        (batch, side, side) if per_pixel else (batch,),
    )
    return _workload(
        name,
        model,
        {"x": images},
        labels,
        classification_loss,
        options,
        lambda module: SGD(module.parameters(), lr=0.01, momentum=0.9),
    )


def _text(
    name: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    labels: Tensor,
    criterion: Callable[[Any, Tensor], Tensor],
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
    criterion: Callable[[Any, Tensor], Tensor],
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
