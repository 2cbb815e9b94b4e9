"""Models of transformers in its own loops: generation, evaluation, accumulation."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from torch.utils.data import Dataset

import remat


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
            use_cache=True,
        )
    )


def t5(num_layers: int = 1) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=num_layers,
            num_heads=4,
            vocab_size=100,
            decoder_start_token_id=0,
        )
    )


TOKENS = torch.randint(1, 100, (8, 24), generator=torch.Generator().manual_seed(1))


def fit(model: Any, **kwargs: Any) -> remat.Plan:
    batch = {"input_ids": TOKENS, "labels": TOKENS.clone(), **kwargs}
    # The Trainer makes one of the same kind.
    optimizer = torch.optim.AdamW(model.parameters())
    return remat.fit(
        model, (), batch, budget="90%", optimizer=optimizer, accumulate=True
    )


@pytest.mark.parametrize("make", [llama, t5])
def test_generation_traces_nothing_and_gives_the_same_tokens(make: Any) -> None:
    plain, model = make().eval(), make()
    fit(model)
    model.eval()
    frames_before = counters["frames"]["total"]
    for length in (3, 7, 12):
        prompt = TOKENS[:, :length]
        expected = plain.generate(prompt, max_new_tokens=8, do_sample=False)
        found = model.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(expected, found)
        torch.manual_seed(2)
        expected = plain.generate(prompt, max_new_tokens=8, do_sample=True)
        torch.manual_seed(2)
        found = model.generate(prompt, max_new_tokens=8, do_sample=True)
        assert torch.equal(expected, found)
    assert counters["frames"]["total"] == frames_before


class Texts(Dataset[dict[str, Any]]):
    """Samples of one length for training, of many lengths for evaluation."""

    def __init__(self, count: int, *, has_many_lengths: bool) -> None:
        generator = torch.Generator().manual_seed(4)
        self.samples = [
            torch.randint(1, 100, (24,), generator=generator)[
                : 5 + index % 13 if has_many_lengths else None
            ]
            for index in range(count)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(
        [sample["input_ids"] for sample in samples], batch_first=True
    )
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def train(model: Any, folder: Path) -> tuple[list[torch.Tensor], list[float]]:
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=4,
        predict_with_generate=True,
        generation_max_length=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Seq2SeqTrainer(
        model,
        arguments,
        data_collator=padded,
        train_dataset=Texts(128, has_many_lengths=False),
        eval_dataset=Texts(12, has_many_lengths=True),
    )
    trainer.train()
    losses = [
        line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line
    ]
    return [p.detach().clone() for p in model.parameters()], losses


def test_the_trainer_plans_nothing_more_and_trains_as_without_remat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Layers of T5 after the first take its position bias.
    model = t5(num_layers=2)
    plain = copy.deepcopy(model)
    # The Trainer gives losses the number of labels.
    fit(model, num_items_in_batch=torch.tensor(384.0))
    frames_before = counters["frames"]["total"]
    found, found_losses = train(model, tmp_path)
    assert counters["frames"]["total"] <= frames_before + 1
    assert not [record for record in caplog.records if record.name == "remat"]
    expected, expected_losses = train(plain, tmp_path)
    assert found_losses == expected_losses
    assert all(map(torch.equal, expected, found))
