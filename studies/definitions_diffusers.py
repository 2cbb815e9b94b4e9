"""Definitions from diffusers: denoisers of images, latents and sequences."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from studies.definitions import (
    Example,
    Registry,
    is_installed,
    library,
    registering,
    torchvision,
)

DEFINITIONS: Registry = {}
define = registering(DEFINITIONS, "diffusers")


def made(kind: str, **settings: Any) -> Any:
    """Return a model of diffusers with random weights."""
    if is_installed("torchvision"):
        torchvision()  # Or the import below may fail.
    return getattr(library("diffusers"), kind)(**settings)


class Denoised(nn.Module):
    """A denoiser with the loss of the noise that it predicts."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, noisy: Tensor, noise: Tensor, **conditions: Any) -> Tensor:
        return functional.mse_loss(self.denoiser(noisy, **conditions).sample, noise)


def denoised(model: Any, shape: tuple[int, ...], **conditions: Any) -> Example:
    """Return a step on noise."""
    args = (torch.randn(shape), torch.randn(shape))
    return Example(model=Denoised(model).train(), args=args, kwargs=conditions)


def _moments(batch: int) -> Tensor:
    return torch.randint(0, 1000, (batch,))


@define("Ho et al. 2020; returns a dataclass")
def ddpm_unet() -> Example:
    model = made(
        "UNet2DModel",
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return denoised(model, (4, 3, 32, 32), timestep=_moments(4))


@define("Rombach et al. 2022; cross attention to text")
def stable_diffusion_unet() -> Example:
    model = made(
        "UNet2DConditionModel",
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    text = torch.randn(4, 16, 32)
    return denoised(
        model, (4, 4, 16, 16), timestep=_moments(4), encoder_hidden_states=text
    )


@define("Peebles and Xie 2023 (DiT); classes")
def dit() -> Example:
    model = made(
        "DiTTransformer2DModel",
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=16,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=1000,
    )
    classes = torch.randint(0, 1000, (8,))
    return denoised(model, (8, 4, 16, 16), timestep=_moments(8), class_labels=classes)


@define("Esser et al. 2024 (Stable Diffusion 3); two streams of attention")
def sd3() -> Example:
    model = made(
        "SD3Transformer2DModel",
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )
    return denoised(
        model,
        (4, 4, 16, 16),
        timestep=_moments(4).float(),
        encoder_hidden_states=torch.randn(4, 16, 32),
        pooled_projections=torch.randn(4, 32),
    )


@define("Black Forest Labs 2024 (Flux); rotary positions, single and double blocks")
def flux() -> Example:
    model = made(
        "FluxTransformer2DModel",
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return denoised(
        model,
        (4, 64, 16),
        timestep=torch.rand(4),
        encoder_hidden_states=torch.randn(4, 16, 32),
        pooled_projections=torch.randn(4, 32),
        txt_ids=torch.zeros(16, 3),
        img_ids=torch.rand(64, 3),
    )


@define("Janner et al. 2022; sequences of actions")
def diffuser_unet1d() -> Example:
    model = made(
        "UNet1DModel",
        sample_size=64,
        in_channels=8,
        out_channels=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        time_embedding_type="positional",
        flip_sin_to_cos=False,
        use_timestep_embedding=True,
        freq_shift=1.0,
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        mid_block_type="MidResTemporalBlock1D",
        up_block_types=("UpResnetBlock1D",),
        out_block_type="OutConv1DBlock",
        norm_num_groups=8,
        act_fn="mish",
    )
    return denoised(model, (16, 8, 64), timestep=_moments(16))


class Autoencoded(nn.Module):
    """A variational autoencoder with the two terms of its loss."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, images: Tensor) -> dict[str, Any]:
        posterior = self.autoencoder.encode(images).latent_dist
        decoded = self.autoencoder.decode(posterior.sample()).sample
        loss = functional.mse_loss(decoded, images) + 1e-3 * posterior.kl().mean()
        return {"loss": loss, "decoded": decoded}


@define("Kingma and Welling 2014 as in Rombach et al. 2022; samples, a distribution")
def autoencoder_kl() -> Example:
    model = made(
        "AutoencoderKL",
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=32,
    )
    return Example(model=Autoencoded(model).train(), args=(torch.randn(4, 3, 32, 32),))


class Quantised(nn.Module):
    """A vector-quantised autoencoder with its loss."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, images: Tensor) -> Tensor:
        found = self.autoencoder(images)
        return functional.mse_loss(found.sample, images) + found.commit_loss.mean()


@define("van den Oord et al. 2017; nearest codes")
def vq_autoencoder() -> Example:
    model = made(
        "VQModel",
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        num_vq_embeddings=64,
    )
    return Example(model=Quantised(model).train(), args=(torch.randn(4, 3, 32, 32),))


@define("Zhang et al. 2023; a list of residuals as conditions, beside a frozen U-Net")
def controlnet() -> Example:
    sizes: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 8,
        "cross_attention_dim": 32,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    }
    control = made(
        "ControlNetModel", conditioning_embedding_out_channels=(16, 32), **sizes
    )
    unet = made(
        "UNet2DConditionModel",
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **sizes,
    )

    class Controlled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.control, self.unet = control, unet.requires_grad_(False)  # noqa: FBT003

        def forward(
            self, noisy: Tensor, moments: Tensor, text: Tensor, edges: Tensor
        ) -> Tensor:
            downs, middle = self.control(
                noisy, moments, text, controlnet_cond=edges, return_dict=False
            )
            predicted = self.unet(
                noisy,
                moments,
                text,
                down_block_additional_residuals=downs,
                mid_block_additional_residual=middle,
            ).sample
            return predicted.square().mean()

    args = (
        torch.randn(4, 4, 16, 16),
        _moments(4),
        torch.randn(4, 16, 32),
        torch.randn(4, 3, 32, 32),
    )
    return Example(model=Controlled().train(), args=args)
