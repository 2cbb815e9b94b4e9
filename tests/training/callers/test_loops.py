"""Who calls a fitted model, and in which order it was prepared: nothing is silent.

Four loops (by hand, accelerate's, Lightning's, the Trainer of transformers), each with
the model fitted before the loop wraps it or after, and compiled by ``torch.compile``
before that, after it, or not at all. In each of the 24 cells the budget is held, and
parameters after five steps are bitwise those of the same loop without remat.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

import remat

pytestmark = pytest.mark.filterwarnings(
    # Lightning calls what torch is about to remove.
    "ignore:.isinstance.treespec, LeafSpec.:FutureWarning"
)

STEPS = 5
BATCH = 64
WIDTH = 64

Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    """A stack of layers that computes its loss inside, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(3)
        )

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Batch:
        for layer in self.layers:
            x = x + layer(x)
        # Its value keeps no larger block, which some loops hold until the next step.
        return {"loss": (x - labels).square().mean()}


VALUES = torch.randn(
    STEPS * BATCH, 8, WIDTH, generator=torch.Generator().manual_seed(1)
)


class Samples(Dataset[Batch]):
    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> Batch:
        return {"x": VALUES[index], "labels": VALUES[index].neg()}


def batches() -> DataLoader[Batch]:
    return DataLoader(Samples(), batch_size=BATCH)


class Wrapper(nn.Module):
    """What a user writes around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Batch:
        return self.model(**batch)


@dataclass
class Case:
    """When a loop's model is fitted and compiled; what came of it."""

    fitted: str = "never"
    compiled: str = "never"
    budget_bytes: int = 0
    plain_peak_bytes: int = 0
    bare: nn.Module = field(default_factory=nn.Identity)
    resident: list[Any] = field(default_factory=list[Any])

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and the optimizer that the loop is given."""
        torch.manual_seed(0)
        self.bare = Net()
        model: Any = self.bare
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.resident = [model, optimizer]
        if self.compiled == "before":
            model = torch.compile(model, backend="aot_eager")
        if self.fitted == "before":
            self.fit(model, optimizer)
            if self.compiled == "after":
                model = torch.compile(model, backend="aot_eager")
        return model, optimizer

    def enter(self, model: nn.Module, optimizer: Any) -> None:
        """Do what is done when the loop has wrapped model and optimizer."""
        if self.fitted == "after" and not self.budget_bytes:
            self.fit(model, optimizer)
            if self.compiled == "after":
                model.compile(backend="aot_eager")

    def fit(self, model: nn.Module, optimizer: Any) -> None:
        # A loader would draw a random number for its workers.
        samples = [Samples()[index] for index in range(BATCH)]
        batch = {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
        plan = remat.fit(model, (), batch, budget="70%", optimizer=optimizer)
        assert plan.recomputed_op_count > 0
        self.budget_bytes = plan.budget_bytes or 0
        self.plain_peak_bytes = plan.baseline_peak_bytes


def by_hand(case: Case, _folder: Path) -> Callable[[], None]:
    model, optimizer = case.make()
    model = Wrapper(model)
    case.enter(model, optimizer)

    def train() -> None:
        torch.manual_seed(7)
        for batch in batches():
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def by_accelerate(case: Case, _folder: Path) -> Callable[[], None]:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*case.make(), batches())
    case.enter(model, optimizer)

    def train() -> None:
        torch.manual_seed(7)
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()

    return train


def by_lightning(case: Case, folder: Path) -> Callable[[], None]:
    model, optimizer = case.make()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_start(self) -> None:
            case.enter(self.model, self.optimizers())

        def training_step(self, batch: Batch, _index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

    module = Module()

    def train() -> None:
        torch.manual_seed(7)
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(module, batches())
        optimizer.zero_grad()

    return train


def by_trainer(case: Case, folder: Path) -> Callable[[], None]:
    class Fits(transformers.TrainerCallback):
        def on_train_begin(
            self, *_: Any, model: Any, optimizer: Any, **__: Any
        ) -> None:
            case.enter(model, optimizer)

    model, optimizer = case.make()
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.0,
            # A compiled module does not show the arguments of its forward.
            remove_unused_columns=False,
        ),
        train_dataset=Samples(),
        callbacks=[Fits()],
        optimizers=(optimizer, rate),
    )

    def train() -> None:
        torch.manual_seed(7)
        trainer.train()

    return train


LOOPS = {
    "by hand": by_hand,
    "accelerate": by_accelerate,
    "Lightning": by_lightning,
    "Trainer": by_trainer,
}


@dataclass(frozen=True)
class Trained:
    """What five steps of a loop left behind, and the peak of five more."""

    parameters: list[torch.Tensor]
    peak_bytes: int


def trained(case: Case, loop: str, folder: Path) -> Trained:
    train = LOOPS[loop](case, folder)
    train()
    parameters = [p.detach().clone() for p in case.bare.parameters()]
    measured = remat.measure(train, warmup=0, repeats=0, resident=case.resident)
    return Trained(parameters, measured.peak_bytes)


@functools.cache
def plainly_trained(loop: str, folder: Path) -> Trained:
    return trained(Case(), loop, folder)


@pytest.mark.parametrize(
    ("loop", "fitted", "compiled"),
    list(product(LOOPS, ("before", "after"), ("never", "before", "after"))),
)
def test_the_budget_is_held_and_results_are_bitwise_those_without_remat(
    loop: str, fitted: str, compiled: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    plain = plainly_trained(loop, folder)
    case = Case(fitted, compiled)
    found = trained(case, loop, folder)
    assert all(map(torch.equal, plain.parameters, found.parameters))
    # What a loop holds beside the step, such as the next batch, is in no plan.
    batch_bytes = 2 * VALUES[:BATCH].nbytes
    beside_bytes = max(0, plain.peak_bytes - case.plain_peak_bytes)
    assert beside_bytes <= 2 * batch_bytes
    assert found.peak_bytes <= case.budget_bytes + beside_bytes
