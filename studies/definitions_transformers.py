"""Definitions from transformers: text, speech, images, experts, state spaces."""

from typing import Any

import torch
from torch import Tensor, nn

from studies.definitions import (
    Definition,
    Example,
    Registry,
    is_installed,
    registering,
    torchvision,
)

DEFINITIONS: Registry = {}
define = registering(DEFINITIONS, "transformers")

VOCABULARY = 512
WIDTH, DEPTH, HEADS, INNER = 64, 3, 4, 128
BATCH, LENGTH = 8, 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(model: str, config: str, **settings: Any) -> Any:
    """Return a model of transformers with random weights, in training mode."""
    if is_installed("torchvision"):
        torchvision()  # Or the import below may fail.
    import transformers  # noqa: PLC0415

    kind = getattr(transformers, config)
    return getattr(transformers, model)(kind(**settings)).train()


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Return random tokens that are no padding."""
    return torch.randint(3, VOCABULARY, (batch, length))


def labelled(model: nn.Module, length: int = LENGTH, **more: Any) -> Example:
    """Return a step on tokens that are their own labels."""
    ids = tokens(length=length)
    kwargs = {"input_ids": ids, "labels": ids.clone(), **more}
    return Example(model=model, kwargs=kwargs)


def padding() -> Tensor:
    """Return a mask of the tokens that are no padding, of rows of unequal length."""
    lengths = torch.arange(LENGTH // 2, LENGTH, LENGTH // 2 // BATCH)[:BATCH]
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def causal(
    name: str,
    model: str,
    config: str,
    source: str,
    length: int = LENGTH,
    **settings: Any,
) -> None:
    """Define a language model that is trained on its own tokens."""

    def build() -> Example:
        return labelled(made(model, config, **_SIZES | settings), length)

    DEFINITIONS[name] = Definition(
        name=name, library="transformers", source=source, build=build
    )


# --- language models with labels, caches, masks ------------------------------------

causal(
    "llama-labels",
    "LlamaForCausalLM",
    "LlamaConfig",
    "Touvron et al. 2023; labels, returns a cache",
)
causal(
    "gpt-neox-states",
    "GPTNeoXForCausalLM",
    "GPTNeoXConfig",
    "Black et al. 2022; labels, collects all hidden states",
    output_hidden_states=True,
)
causal(
    "gemma2-labels",
    "Gemma2ForCausalLM",
    "Gemma2Config",
    "Gemma Team 2024; labels, capped scores, windows",
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=32,
)
causal(
    "phi3-labels",
    "Phi3ForCausalLM",
    "Phi3Config",
    "Abdin et al. 2024; labels",
    num_key_value_heads=2,
)
causal(
    "bloom-labels",
    "BloomForCausalLM",
    "BloomConfig",
    "Le Scao et al. 2022; labels, linear biases of attention",
    n_layer=DEPTH,
    n_head=HEADS,
)
causal(
    "falcon-labels",
    "FalconForCausalLM",
    "FalconConfig",
    "Almazrouei et al. 2023; labels, one key for all heads",
)
causal(
    "mamba-labels",
    "MambaForCausalLM",
    "MambaConfig",
    "Gu and Dao 2023; labels, state space with an associative scan",
    use_associative_scan=False,
    num_hidden_layers=2,
)
causal(
    "mamba2-labels",
    "Mamba2ForCausalLM",
    "Mamba2Config",
    "Dao and Gu 2024; labels, state space in chunks",
    num_heads=8,
    head_dim=16,
    state_size=16,
    n_groups=1,
    chunk_size=16,
    num_hidden_layers=2,
)
causal(
    "rwkv-labels",
    "RwkvForCausalLM",
    "RwkvConfig",
    "Peng et al. 2023; labels, recurrent attention in a loop over time",
    length=16,
    attention_hidden_size=WIDTH,
    num_hidden_layers=2,
)
causal(
    "recurrent-gemma-labels",
    "RecurrentGemmaForCausalLM",
    "RecurrentGemmaConfig",
    "De et al. 2024; labels, linear recurrences among attention",
    lru_width=WIDTH,
    num_key_value_heads=1,
    head_dim=16,
    attention_window_size=32,
    num_hidden_layers=3,
)
causal(
    "jamba-router",
    "JambaForCausalLM",
    "JambaConfig",
    "Lieber et al. 2024; labels, state spaces, attention, experts and their router",
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    use_mamba_kernels=False,
    mamba_d_state=8,
    output_router_logits=True,
    num_hidden_layers=2,
)
causal(
    "mixtral-router",
    "MixtralForCausalLM",
    "MixtralConfig",
    "Jiang et al. 2024; labels, experts, loss of the router",
    num_key_value_heads=2,
    num_local_experts=4,
    output_router_logits=True,
)
causal(
    "qwen2-moe-router",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeConfig",
    "Yang et al. 2024; labels, experts and a shared one, loss of the router",
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    output_router_logits=True,
)
causal(
    "olmoe-router",
    "OlmoeForCausalLM",
    "OlmoeConfig",
    "Muennighoff et al. 2024; labels, experts, loss of the router",
    num_key_value_heads=4,
    num_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
)
causal(
    "deepseek-v3-labels",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    "DeepSeek-AI 2024; labels, latent attention, experts",
    num_key_value_heads=4,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    num_hidden_layers=2,
)


def _gpt2() -> Any:
    return made(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        n_positions=2 * LENGTH,
        bos_token_id=1,
        eos_token_id=2,
    )


def _llama(**settings: Any) -> Any:
    return made("LlamaForCausalLM", "LlamaConfig", **_SIZES | settings)


@define("Radford et al. 2019; labels, loss inside")
def gpt2_labels() -> Example:
    return labelled(_gpt2())


@define("Touvron et al. 2023; labels, padding mask, no cache")
def llama_padding() -> Example:
    return labelled(_llama(use_cache=False), attention_mask=padding())


class Continued(nn.Module):
    """A language model trained on what follows a prefix, by way of its cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, prefix: Tensor, ids: Tensor) -> Tensor:
        cache = self.model(prefix, use_cache=True).past_key_values
        return self.model(ids, past_key_values=cache, labels=ids).loss


@define("Touvron et al. 2023; keys and values of a prefix in a cache, labels")
def llama_cache() -> Example:
    return Example(model=Continued(_llama()), args=(tokens(), tokens()))


@define("Shazeer et al. 2021 as Switch Transformers; labels, losses of the routers")
def switch_router() -> Example:
    model = made(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        d_ff=INNER,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=HEADS,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        output_router_logits=True,
        decoder_start_token_id=0,
    )
    return labelled(model)


@define("Beltagy et al. 2020; labels, windows and global tokens of a padding mask")
def longformer_padding() -> Example:
    model = made(
        "LongformerForMaskedLM",
        "LongformerConfig",
        **_SIZES,
        attention_window=16,
        max_position_embeddings=LENGTH + 8,
    )
    spans = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    spans[:, :2] = 1
    return labelled(model, attention_mask=padding(), global_attention_mask=spans)


@define("Yang et al. 2019; labels of a class, relative positions")
def xlnet_class() -> Example:
    model = made(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        d_inner=INNER,
    )
    labels = torch.randint(0, 2, (BATCH,))
    return Example(model=model, kwargs={"input_ids": tokens(), "labels": labels})


@define("Kitaev et al. 2020; labels, reversible layers, hashed attention")
def reformer_labels() -> Example:
    model = made(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=16,
        feed_forward_size=INNER,
        attn_layers=["local", "lsh"],
        axial_pos_shape=(8, 8),
        axial_pos_embds_dim=(32, 32),
        local_attn_chunk_length=16,
        lsh_attn_chunk_length=16,
        num_buckets=4,
        is_decoder=True,
    )
    return labelled(model)


# --- encoders ----------------------------------------------------------------------


def _encoder(model: str, config: str, **settings: Any) -> Any:
    sizes = {**_SIZES, "max_position_embeddings": LENGTH + 2, **settings}
    return made(model, config, **sizes)


@define("Devlin et al. 2019; masked tokens as labels, padding mask")
def bert_padding() -> Example:
    return labelled(_encoder("BertForMaskedLM", "BertConfig"), attention_mask=padding())


@define("Devlin et al. 2019; labels, returns every attention")
def bert_attentions() -> Example:
    model = _encoder(
        "BertForTokenClassification",
        "BertConfig",
        attn_implementation="eager",
        output_attentions=True,
    )
    ids = tokens()
    return Example(model=model, kwargs={"input_ids": ids, "labels": ids % 2})


@define("Liu et al. 2019; labels of a class")
def roberta_class() -> Example:
    model = _encoder("RobertaForSequenceClassification", "RobertaConfig")
    labels = torch.randint(0, 2, (BATCH,))
    return Example(model=model, kwargs={"input_ids": tokens(), "labels": labels})


@define("Lan et al. 2020; masked tokens as labels, one layer used several times")
def albert_shared() -> Example:
    return labelled(_encoder("AlbertForMaskedLM", "AlbertConfig", embedding_size=32))


@define("Clark et al. 2020; labels of replaced tokens, padding mask: x[mask]")
def electra_padding() -> Example:
    model = _encoder("ElectraForPreTraining", "ElectraConfig", embedding_size=32)
    labels = torch.randint(0, 2, (BATCH, LENGTH)).float()
    kwargs = {"input_ids": tokens(), "labels": labels, "attention_mask": padding()}
    return Example(model=model, kwargs=kwargs)


@define("He et al. 2021; labels, disentangled positions")
def deberta_labels() -> Example:
    model = _encoder(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
    )
    return labelled(model)


@define("Devlin et al. 2019 for questions: start and end as labels")
def distilbert_spans() -> Example:
    model = made(
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=WIDTH,
        n_layers=DEPTH,
        n_heads=HEADS,
        hidden_dim=INNER,
    )
    start, end = torch.randint(0, LENGTH, (2, BATCH))
    kwargs = {"input_ids": tokens(), "start_positions": start, "end_positions": end}
    return Example(model=model, kwargs=kwargs)


# --- encoders and decoders ---------------------------------------------------------


@define("Raffel et al. 2020; labels, padding mask")
def t5_labels() -> Example:
    model = made(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        d_ff=INNER,
        num_layers=2,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    return labelled(model, attention_mask=padding())


@define("Lewis et al. 2020; labels")
def bart_labels() -> Example:
    model = made(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return labelled(model)


# --- speech ------------------------------------------------------------------------


@define("Radford et al. 2022; labels of text for mel spectra")
def whisper_labels() -> Example:
    model = made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        num_mel_bins=20,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_source_positions=100,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = torch.randn(4, 20, 200)
    return Example(
        model=model, kwargs={"input_features": features, "labels": tokens(4, 32)}
    )


_SPEECH = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 4,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}


def _speech(model: Any) -> Example:
    sound = torch.randn(4, 8000)
    labels = torch.randint(1, 32, (4, 12))
    return Example(model=model, kwargs={"input_values": sound, "labels": labels})


@define("Baevski et al. 2020; labels by CTC, spans masked at random")
def wav2vec2_ctc() -> Example:
    return _speech(made("Wav2Vec2ForCTC", "Wav2Vec2Config", **_SPEECH))


@define("Hsu et al. 2021; labels by CTC")
def hubert_ctc() -> Example:
    return _speech(made("HubertForCTC", "HubertConfig", **_SPEECH))


@define("Chen et al. 2022 (WavLM); labels by CTC, gated positions")
def wavlm_ctc() -> Example:
    return _speech(made("WavLMForCTC", "WavLMConfig", **_SPEECH))


@define("Gong et al. 2021 (AST); labels of a class for spectra")
def ast_class() -> Example:
    model = made(
        "ASTForAudioClassification",
        "ASTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_length=128,
        num_mel_bins=64,
        num_labels=5,
    )
    kwargs = {
        "input_values": torch.randn(BATCH, 128, 64),
        "labels": torch.randint(0, 5, (BATCH,)),
    }
    return Example(model=model, kwargs=kwargs)


# --- images ------------------------------------------------------------------------


def _image_class(
    model: Any, side: int, n_classes: int = 5, batch: int = BATCH
) -> Example:
    kwargs = {
        "pixel_values": torch.randn(batch, 3, side, side),
        "labels": torch.randint(0, n_classes, (batch,)),
    }
    return Example(model=model, kwargs=kwargs)


@define("Dosovitskiy et al. 2021; labels")
def vit_labels() -> Example:
    model = made(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=64,
        patch_size=8,
        num_labels=5,
    )
    return _image_class(model, 64)


@define("Liu et al. 2021; labels, shifted windows")
def swin_labels() -> Example:
    model = made(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=64,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    )
    return _image_class(model, 64)


@define("Liu et al. 2022; labels")
def convnext_labels() -> Example:
    model = made(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 2, 1],
        num_labels=5,
    )
    return _image_class(model, 64)


@define("Xie et al. 2021; labels of pixels")
def segformer_pixels() -> Example:
    model = made(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=64,
        num_labels=5,
    )
    kwargs = {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.randint(0, 5, (4, 64, 64)),
    }
    return Example(model=model, kwargs=kwargs)


@define("He et al. 2022; random masks, returns the loss of its pixels")
def mae_pixels() -> Example:
    model = made(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=64,
        patch_size=8,
        decoder_hidden_size=WIDTH,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=HEADS,
        decoder_intermediate_size=INNER,
    )
    return Example(model=model, kwargs={"pixel_values": torch.randn(16, 3, 64, 64)})


@define("Carion et al. 2020; boxes as labels, matched by scipy on the host")
def detr_boxes() -> Example:
    import transformers  # noqa: PLC0415

    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    model = made(
        "DetrForObjectDetection",
        "DetrConfig",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        num_queries=10,
        num_labels=4,
    )
    labels = [
        {
            "class_labels": torch.randint(0, 4, (count,)),
            "boxes": torch.rand(count, 4) * 0.4 + 0.1,
        }
        for count in (1, 3, 2, 2)
    ]
    kwargs = {"pixel_values": torch.randn(4, 3, 128, 128), "labels": labels}
    return Example(model=model, kwargs=kwargs)


# --- several kinds of input ---------------------------------------------------------


@define("Radford et al. 2021; contrastive loss inside")
def clip_contrast() -> Example:
    tower = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
    }
    model = made(
        "CLIPModel",
        "CLIPConfig",
        text_config={
            **tower,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": LENGTH,
            "eos_token_id": 2,
        },
        vision_config={**tower, "image_size": 64, "patch_size": 8},
        projection_dim=32,
    )
    kwargs = {
        "input_ids": tokens(),
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "return_loss": True,
    }
    return Example(model=model, kwargs=kwargs)


@define("Kim et al. 2021; text and image in one encoder, labels")
def vilt_labels() -> Example:
    model = made(
        "ViltForQuestionAnswering",
        "ViltConfig",
        **{**_SIZES, "max_position_embeddings": LENGTH},
        image_size=64,
        patch_size=8,
        max_image_length=-1,
        num_labels=5,
    )
    kwargs = {
        "input_ids": tokens(4, 32),
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.rand(4, 5),
    }
    return Example(model=model, kwargs=kwargs)


# --- time series --------------------------------------------------------------------


@define("Nie et al. 2023 (PatchTST); future values as labels")
def patchtst_values() -> Example:
    model = made(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        num_input_channels=4,
        context_length=128,
        prediction_length=16,
        patch_length=8,
        patch_stride=4,
        d_model=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        ffn_dim=INNER,
    )
    kwargs = {
        "past_values": torch.randn(BATCH, 128, 4),
        "future_values": torch.randn(BATCH, 16, 4),
    }
    return Example(model=model, kwargs=kwargs)


@define("Zhou et al. 2021 (Informer); future values as labels, random queries")
def informer_values() -> Example:
    model = made(
        "InformerForPrediction",
        "InformerConfig",
        prediction_length=16,
        context_length=64,
        lags_sequence=[1, 2],
        num_time_features=2,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
    )
    past = 66
    kwargs = {
        "past_values": torch.rand(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, 2),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.rand(BATCH, 16),
        "future_time_features": torch.randn(BATCH, 16, 2),
    }
    return Example(model=model, kwargs=kwargs)
