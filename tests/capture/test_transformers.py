"""Models of transformers with labels, as people call them: caches, masks, logs."""

import importlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.training.fitted_model import fitted_on

VOCABULARY, LENGTH = 97, 16
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT": (
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "Llama": ("ForCausalLM", SMALL),
    "Qwen2": ("ForCausalLM", SMALL),
    "Gemma2": ("ForCausalLM", {**SMALL, "head_dim": 8}),
    "Qwen2Moe": (
        "ForCausalLM",
        {
            **SMALL,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "Mixtral": (
        "ForCausalLM",
        {
            **SMALL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        },
    ),
    "Bloom": (
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "GPT2": (
        "LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
    ),
    "T5": (
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "Whisper": (
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "begin_suppress_tokens": None,
        },
    ),
}


@pytest.fixture(autouse=True)
def transformers() -> Iterator[Any]:
    """The library, where it is installed; its own deprecations are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers")


def made(kind: str, head: str, settings: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = getattr(library, f"{kind}Config")(**settings)
    return getattr(library, kind + head)(config).train()


def decoder(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    head, settings = DECODERS[kind]
    model = made(kind, head, settings)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    if kind == "Whisper":
        return model, {"input_features": torch.randn(2, 8, 32), "labels": tokens}
    return model, {"input_ids": tokens, "labels": tokens}


def verified(model: nn.Module, batch: dict[str, torch.Tensor]) -> remat.VerifyReport:
    return remat.verify(model, (), batch, budget="100%", costs="estimated", repeats=1)


@cache
def verified_decoder(kind: str) -> remat.VerifyReport:
    return verified(*decoder(kind))


VERIFIED = ("OPT", "GPT2")


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_with_labels_has_no_assumed_loss(kind: str) -> None:
    if kind in VERIFIED:
        plan = verified_decoder(kind).plan
    else:
        model, batch = decoder(kind)
        plan = remat.plan(model, (), batch, budget="100%", costs="estimated")
    (loss,) = [op for op in plan.graph.ops if op.name.endswith("(loss)")]
    assert loss.workspace_bytes == (0,)
    assert [plan.graph.storages[s].size_bytes for s in loss.writes] == [0]


@pytest.mark.parametrize("kind", VERIFIED)
def test_a_decoder_with_labels_takes_what_is_predicted(kind: str) -> None:
    report = verified_decoder(kind)
    assert report.against_captured == ()
    assert report.against_eager == ()
    assert abs(report.prediction_error) < 0.01
    assert report.is_within_budget


def test_tuples_with_caches_have_a_loss_too() -> None:
    model, batch = decoder("OPT")
    plan = remat.plan(
        model, (), {**batch, "return_dict": False}, budget="100%", costs="estimated"
    )
    (loss,) = [op for op in plan.graph.ops if op.name.endswith("(loss)")]
    assert loss.workspace_bytes == (0,)


@pytest.mark.parametrize("kind", ["OPT", "GPT2"])
def test_a_model_that_checkpoints_itself_is_fitted(kind: str) -> None:
    model, batch = decoder(kind)
    model.gradient_checkpointing_enable()
    report = verified(model, batch)
    assert report.against_captured == ()
    assert report.against_eager == ()


def test_a_fresh_mixture_is_fitted_before_its_first_call() -> None:
    model, batch = decoder("Mixtral")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    remat.fit(model, (), batch, budget="100%", costs="estimated")
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(state[n], value) for n, value in model.state_dict().items())
    fitted = fitted_on(model)
    assert fitted is not None
    traced_count = fitted.backend.training_step_count
    outputs = model(**batch)
    outputs.loss.backward()
    # The library left hooks as it was traced, and these are in that trace.
    assert fitted.backend.training_step_count == traced_count
    plain, _ = decoder("Mixtral")
    expected = plain(**batch)
    expected.loss.backward()
    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(outputs.aux_loss, expected.aux_loss)
    assert len(outputs.router_logits) == len(expected.router_logits) == 2
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_hooks_run_that_come_after_the_library_has_left_its_own() -> None:
    model, batch = decoder("Llama")
    plain, _ = decoder("Llama")
    remat.fit(model, (), batch, budget="100%", costs="estimated")
    for options in ({}, {"output_hidden_states": True}, {}):
        found, expected = (each(**batch, **options) for each in (model, plain))
        assert torch.equal(found.loss, expected.loss)

    def double(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
        return 2 * out

    for each in (model, plain):
        each.get_submodule("lm_head").register_forward_hook(double)
    assert torch.equal(model(**batch).loss, plain(**batch).loss)


def test_a_mask_of_ones_is_exact_to_the_captured_step() -> None:
    model, batch = decoder("Llama")
    mask = torch.ones_like(batch["input_ids"])
    report = verified(model, {**batch, "attention_mask": mask})
    assert report.is_exact
    # Eager, the model looks at the mask's values and leaves it out: on some processors
    # that differs in the last digits.
    assert all(each.largest < 1e-6 for each in report.against_eager)


def segmenter(batch_count: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = made(
        "Segformer",
        "ForSemanticSegmentation",
        {
            "num_labels": 5,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "decoder_hidden_size": 16,
        },
    )
    pixels = torch.randn(batch_count, 3, 64, 64)
    return model, {
        "pixel_values": pixels,
        "labels": torch.randint(0, 5, (batch_count, 64, 64)),
    }


@pytest.mark.parametrize("batch_count", [1, 2])
def test_a_fresh_segmenter_is_fitted_and_bitwise_eager(batch_count: int) -> None:
    report = verified(*segmenter(batch_count))
    assert report.against_captured == ()
    assert report.against_eager == ()
