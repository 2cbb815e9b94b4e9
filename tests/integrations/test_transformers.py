"""The Trainer of transformers within a budget: bitwise the same, and never above it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.integrations import late, texts
from tests.integrations.common import QUICK, Trained, trained
from tests.integrations.digits import BATCH, STEPS, Digits, Model
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import remat
from remat.core.errors import CaptureError, ExecutionError, UnitError
from remat.core.graph import Role
from remat.integrations.transformers import (
    MemoryBudgetArguments,
    MemoryBudgetCallback,
)
from remat.training.fitted_model import fitted_on


class Evaluations(transformers.TrainerCallback):
    """Collects what evaluations in between find."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
        self.losses.append(metrics["eval_loss"])


def trainer(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    data: Any = None,
    optimizers: Any = (None, None),
    **given: Any,
) -> transformers.Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    return transformers.Trainer(
        model or Model(),
        transformers.TrainingArguments(**{**settings, **given}),
        train_dataset=data or Digits(),
        eval_dataset=Digits(is_held_out=True),
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def run(found: transformers.Trainer, **given: Any) -> Trained:
    model: Any = found.model
    return trained(model, lambda: found.train(**given))


CASES: dict[str, dict[str, Any]] = {
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
    "accumulation, bf16": {"gradient_accumulation_steps": 2, "bf16": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_budget_is_kept_and_parameters_are_bitwise_the_same(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, evaluations = Evaluations(), Evaluations()
    plain = run(trainer(tmp_path, expected, **CASES[name]))
    callback = MemoryBudgetCallback(plain.budget_bytes, **QUICK)
    found = run(trainer(tmp_path, callback, evaluations, **CASES[name]))
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)
    assert evaluations.losses == expected.losses
    assert len(expected.losses) == (3 if name == "evaluation" else 0)
    assert callback.plan is not None
    assert callback.plan.recomputed_op_count > 0
    # Nothing else is planned in the middle of training.
    assert not [record for record in caplog.records if record.name == "remat"]


def test_a_language_model_with_smoothed_labels_keeps_its_budget(tmp_path: Path) -> None:
    def found(*callbacks: Any) -> Trained:
        model, data = texts.gpt2(layers=1), texts.Texts(4 * texts.BATCH)
        return run(
            trainer(
                tmp_path,
                *callbacks,
                model=model,
                data=data,
                label_smoothing_factor=0.1,
                per_device_train_batch_size=texts.BATCH,
                bf16=True,
            )
        )

    plain = found()
    planned = found(MemoryBudgetCallback(plain.budget_bytes, **QUICK))
    assert planned.peak_bytes <= plain.budget_bytes
    assert planned.is_bitwise(plain)


def layer_wise(model: torch.nn.Module) -> tuple[Any, Any]:
    """Return what a ``Trainer`` makes for optimizers of one layer each."""
    found = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step(parameter: torch.nn.Parameter) -> None:
        found[parameter].step()
        found[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    dummy = LayerWiseDummyOptimizer(optimizer_dict=found)
    return dummy, torch.optim.lr_scheduler.ConstantLR(dummy, factor=1)


def test_layer_wise_optimizers_keep_a_budget(tmp_path: Path) -> None:
    def found(*callbacks: Any) -> Trained:
        model, data = texts.gpt2(layers=2), texts.Texts(4 * texts.BATCH)
        return run(
            trainer(
                tmp_path,
                *callbacks,
                model=model,
                data=data,
                optimizers=layer_wise(model),
                per_device_train_batch_size=texts.BATCH,
            )
        )

    plain = found()
    callback = MemoryBudgetCallback(plain.budget_bytes, **QUICK)
    planned = found(callback)
    assert planned.peak_bytes <= plain.budget_bytes
    assert planned.is_bitwise(plain)
    assert callback.plan is not None
    weight_bytes = sum(value.nbytes for value in plain.parameters)
    states = [s for s in callback.plan.graph.storages if s.role is Role.OPTIMIZER_STATE]
    assert sum(state.size_bytes for state in states) > 2 * weight_bytes


def in_two_halves(folder: Path, budget: Any = None) -> Trained:
    """Train, save, and go on with a new model from what was saved."""
    callbacks = [] if budget is None else [MemoryBudgetCallback(budget, **QUICK)]
    saved = {"save_strategy": "steps", "save_steps": STEPS // 2}

    class Stops(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    trainer(folder, *callbacks, Stops(), **saved).train()
    callbacks = [] if budget is None else [MemoryBudgetCallback(budget, **QUICK)]
    return run(trainer(folder, *callbacks), resume_from_checkpoint=True)


def test_a_checkpoint_resumes_within_the_budget(tmp_path: Path) -> None:
    plain = in_two_halves(tmp_path / "plain")
    found = in_two_halves(tmp_path / "planned", plain.budget_bytes)
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)


def test_after_an_error_the_same_trainer_trains_again(tmp_path: Path) -> None:
    found = trainer(tmp_path, MemoryBudgetCallback("1 KiB", **QUICK), max_steps=1)
    for _ in range(2):
        with pytest.raises(remat.BudgetError, match="smallest known budget"):
            found.train()


def test_the_command_line_gives_a_budget_and_plans_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--max_steps", "1", "--use_cpu", "--memory_budget", "80%"]
    words += ["--per_device_train_batch_size", str(BATCH)]
    words += ["--memory_solver", QUICK["solver"], "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    types: Any = (transformers.TrainingArguments, MemoryBudgetArguments)
    parser = transformers.HfArgumentParser(types)
    arguments, memory = parser.parse_args_into_dataclasses()
    callbacks = memory.callbacks()
    found = transformers.Trainer(
        Model(), arguments, train_dataset=Digits(), callbacks=callbacks
    )
    found.train()
    assert "forward" not in vars(found.model)
    plan = callbacks[0].plan
    assert plan.budget_bytes == plan.baseline_peak_bytes * 8 // 10
    assert MemoryBudgetArguments().callbacks() == []
    # The same Trainer trains again, by the plan that was saved.
    plan.save(tmp_path / "plan.json")
    saved = MemoryBudgetCallback(plan=remat.load_plan(tmp_path / "plan.json"))
    found.remove_callback(MemoryBudgetCallback)
    found.add_callback(saved)
    found.train()
    assert saved.plan is not None
    assert saved.plan.schedule == plan.schedule


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_what_shards_the_model_is_refused_by_name(name: str) -> None:
    arguments = transformers.TrainingArguments(use_cpu=True)
    setattr(arguments, name, {"fsdp_version": 2})
    given: dict[str, Any] = {"model": Model(), "optimizer": None}
    unused: Any = None
    with pytest.raises(CaptureError, match=f"{name}.*DistributedDataParallel"):
        MemoryBudgetCallback("1 GiB").on_train_begin(arguments, unused, unused, **given)


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 1), ("cpu:0", 2)])
def test_a_batch_that_is_copied_to_its_device_is_there_twice(
    device: str, ahead: int
) -> None:
    x, there = torch.zeros(2), torch.device(device)
    assert (x.to(there).data_ptr() != x.data_ptr()) == (ahead == 2)
    model = Model()
    arguments: Any = SimpleNamespace(
        deepspeed=None, fsdp=None, gradient_accumulation_steps=1, device=there
    )
    given: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    unused: Any = None
    callback = MemoryBudgetCallback("1 GiB")
    callback.on_train_begin(arguments, unused, unused, **given)
    fitted = fitted_on(model)
    assert fitted is not None
    assert fitted.planner.loop.batches_ahead == ahead


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_that_workers_bring_early_are_in_the_budget(tmp_path: Path) -> None:
    def found(*callbacks: Any) -> Trained:
        trained = trainer(
            tmp_path,
            *callbacks,
            per_device_train_batch_size=len(Digits()) // STEPS,
            dataloader_num_workers=late.WORKERS,
            dataloader_prefetch_factor=late.EACH,
        )
        trained.data_collator = late.Late(STEPS)
        return run(trained)

    plain = found()
    callback = MemoryBudgetCallback(plain.budget_bytes, **QUICK)
    planned = found(callback)
    assert planned.is_bitwise(plain)
    assert callback.plan is not None
    assert planned.peak_bytes <= callback.plan.peak_bytes <= plain.budget_bytes
    # All that count are there.
    assert planned.peak_bytes > 0.99 * callback.plan.peak_bytes


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_refusal_tells_of_early_batches() -> None:
    model = Model()
    arguments: Any = SimpleNamespace(
        deepspeed=None,
        fsdp=None,
        gradient_accumulation_steps=1,
        device=torch.device("cpu"),
    )
    given: Any = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "train_dataloader": DataLoader(Digits(), num_workers=2),
    }
    unused: Any = None
    MemoryBudgetCallback("1 KiB", **QUICK).on_train_begin(
        arguments, unused, unused, **given
    )
    with pytest.raises(remat.BudgetError) as caught:
        model(torch.ones(8, 64), torch.zeros(8).long())
    assert "2 more like it count" in caught.value.__notes__[-1]


class Around(transformers.Trainer):
    """Calls a part of the model, and not the model."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model.classifier(inputs["x"])
        return torch.nn.functional.cross_entropy(logits, inputs["labels"])


def test_a_step_around_the_model_is_an_error(tmp_path: Path) -> None:
    found = Around(
        Model(),
        transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=3, report_to=[]
        ),
        train_dataset=Digits(),
        callbacks=[MemoryBudgetCallback("1 GiB")],
    )
    with pytest.raises(ExecutionError, match="did not call Model"):
        found.train()
    assert "forward" not in vars(found.model)


def test_one_model_has_one_budget(tmp_path: Path) -> None:
    both = MemoryBudgetCallback("1 GiB"), MemoryBudgetCallback("2 GiB")
    with pytest.raises(ValueError, match="Model has a budget already"):
        trainer(tmp_path, *both).train()
    model = Model()
    remat.fit(
        model, (torch.ones(8, 64), torch.zeros(8).long()), budget="1 GiB", **QUICK
    )
    with pytest.raises(ValueError, match=r"remat\.release\(model\)"):
        trainer(tmp_path, both[0], model=model).train()


def test_arguments_are_checked_at_the_door() -> None:
    with pytest.raises(UnitError, match="unknown unit"):
        MemoryBudgetCallback("24 XB")
    with pytest.raises(UnitError, match="give a budget"):
        MemoryBudgetCallback()
    with pytest.raises(TypeError, match="leave optimizer= out"):
        MemoryBudgetCallback("1 GiB", optimizer=None)
    wrong: dict[str, Any] = {"budgets": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'budgets'"):
        MemoryBudgetCallback("1 GiB", **wrong)
