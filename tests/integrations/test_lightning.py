"""Lightning's Trainer within a budget: bitwise the same, and never above it."""

import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from tests.integrations import late
from tests.integrations.common import QUICK, Trained, trained
from tests.integrations.digits import STEPS, Batch, Classifier, Digits, loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import remat
from remat.core.errors import CaptureError, ExecutionError, UnitError
from remat.integrations.lightning import MemoryBudget, network_of

pytestmark = [
    # Lightning calls what torch is about to remove.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many"),
]


@pytest.fixture(autouse=True)
def _no_process_group() -> Any:
    yield
    # Lightning keeps what it began for DistributedDataParallel.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK"):
        os.environ.pop(name, None)


class Automatic(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Classifier()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def loss(self, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(self.model(batch["x"]), batch["labels"])

    def training_step(self, batch: Batch, _index: int) -> Any:
        return self.loss(batch)


class Manual(Automatic):
    """Steps two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.model.blocks.parameters(), 1e-3),
            torch.optim.SGD(self.model.head.parameters(), 1e-2, momentum=0.9),
        ]

    def training_step(self, batch: Batch, _index: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()


class Rows(nn.Module):
    """Attention with dropout over the rows of an image, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Linear(8, 96), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.blocks(x.view(-1, 8, 8)).view(-1, 8, 3, 4, 8)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1
        )
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


class ManualRows(Manual):
    """Its backward pass, inside of autocast, computes other gradients there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Rows()


class Itself(Automatic):
    """Has several parts, which its own forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.model(x))

    def training_step(self, batch: Batch, _index: int) -> Any:
        return functional.cross_entropy(self(batch["x"]), batch["labels"])


class Tuned(Itself):
    """Trains its last part alone for now."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)


class Stream(IterableDataset[Batch]):
    """Batches of a number that nobody knows."""

    def __init__(self) -> None:
        self.loader = loader()

    def __iter__(self) -> Any:
        return iter(self.loader)


def trainer(folder: Path, *callbacks: Any, **given: Any) -> lightning.Trainer:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return lightning.Trainer(**{**settings, **given})


def run(
    module: lightning.LightningModule,
    folder: Path,
    *callbacks: Any,
    data: Any = loader,
    **given: Any,
) -> Trained:
    batches = data()
    found = trainer(folder, *callbacks, **given)
    return trained(module, lambda: found.fit(module, batches))


CASES: dict[str, tuple[type[Automatic], dict[str, Any]]] = {
    "automatic, no length": (
        Automatic,
        {"data": lambda: DataLoader(Stream(), batch_size=None)},
    ),
    "manual": (Manual, {}),
    "accumulation, bf16-mixed": (
        Automatic,
        {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
    ),
    "forward of its own, ddp": (Itself, {"strategy": "ddp"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_budget_is_kept_and_parameters_are_bitwise_the_same(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, given = CASES[name]
    plain = run(make(), tmp_path, **given)
    callback = MemoryBudget(plain.budget_bytes, **QUICK)
    found = run(make(), tmp_path, callback, **given)
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)
    assert callback.plan is not None
    assert callback.plan.recomputed_op_count > 0
    # Nothing else is planned in the middle of training.
    assert not [r for r in caplog.records if r.name == "remat"]


def test_manual_optimization_is_bitwise_also_under_autocast(tmp_path: Path) -> None:
    plain = run(ManualRows(), tmp_path, precision="bf16-mixed")
    callback = MemoryBudget("90%", **QUICK)
    found = run(ManualRows(), tmp_path, callback, precision="bf16-mixed")
    assert found.is_bitwise(plain)


def in_two_halves(folder: Path, budget: Any = None) -> Trained:
    """Train, save, and go on with a new model from what was saved."""
    callbacks = [] if budget is None else [MemoryBudget(budget, **QUICK)]
    torch.manual_seed(7)
    before = trainer(folder, *callbacks, max_steps=STEPS // 2)
    before.fit(Automatic(), loader())
    before.save_checkpoint(folder / "half.ckpt")
    callbacks = [] if budget is None else [MemoryBudget(budget, **QUICK)]
    after, module, batches = trainer(folder, *callbacks), Automatic(), loader()
    return trained(
        module, lambda: after.fit(module, batches, ckpt_path=folder / "half.ckpt")
    )


def test_a_checkpoint_resumes_within_the_budget(tmp_path: Path) -> None:
    plain = in_two_halves(tmp_path)
    found = in_two_halves(tmp_path, plain.budget_bytes)
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)


def test_after_training_the_network_runs_as_before(tmp_path: Path) -> None:
    module = Automatic()
    trainer(tmp_path, MemoryBudget("90%", **QUICK), max_steps=1).fit(module, loader())
    assert "forward" not in vars(module.model)


def test_an_error_in_training_leaves_the_network_as_before(tmp_path: Path) -> None:
    module = Automatic()
    with pytest.raises(remat.BudgetError, match="smallest known budget"):
        trainer(tmp_path, MemoryBudget("1 KiB", **QUICK)).fit(module, loader())
    assert "forward" not in vars(module.model)


def test_a_strategy_of_older_sharding_is_refused_by_name() -> None:
    class Found:
        strategy = FSDPStrategy()

    found: Any = Found()
    with pytest.raises(CaptureError, match=r"FSDPStrategy.*ModelParallelStrategy"):
        MemoryBudget("1 GiB").on_train_start(found, Automatic())


class Sharded(Automatic):
    """Divides its network among the processes of a mesh."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (1,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def test_a_network_that_fully_shard_divides_is_trained_by_its_plan(
    tmp_path: Path,
) -> None:
    found: list[list[torch.Tensor]] = []
    budget = MemoryBudget("80%", costs="estimated", **QUICK)
    for callbacks in ([], [budget]):
        strategy = ModelParallelStrategy(1, 1, process_group_backend="gloo")
        module = Sharded()
        torch.manual_seed(7)
        fit = trainer(tmp_path, *callbacks, strategy=strategy, max_steps=3).fit
        fit(module, loader())
        parameters: list[Any] = list(module.parameters())
        found.append([parameter.to_local().clone() for parameter in parameters])
    assert all(map(torch.equal, *found))
    assert budget.plan is not None
    assert budget.plan.recomputed_op_count > 0


class Parts(Automatic):
    """Its training step calls its parts, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(10, 10)

    def training_step(self, batch: Batch, _index: int) -> Any:
        logits = self.last(self.model(batch["x"]))
        return functional.cross_entropy(logits, batch["labels"])


def test_which_part_has_the_budget_must_be_clear(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'model', 'last'.*module='model'"):
        trainer(tmp_path, MemoryBudget("1 GiB")).fit(Parts(), loader())
    with pytest.raises(ValueError, match=r"module='net'.*'model', 'last'"):
        trainer(tmp_path, MemoryBudget("1 GiB", module="net")).fit(Parts(), loader())
    module = Parts()
    callback = MemoryBudget("90%", module="model", **QUICK)
    trainer(tmp_path, callback, max_steps=1).fit(module, loader())
    assert callback.plan is not None


def test_parts_that_are_frozen_for_now_are_in_the_budget() -> None:
    module = Tuned()
    assert network_of(module, None) is module


def test_all_of_a_batch_counts(tmp_path: Path) -> None:
    batch = {"x": torch.randn(64, 64), "labels": torch.zeros(64, dtype=torch.long)}
    aside = torch.zeros(100_000)
    peaks: list[int] = []
    for each in (batch, {**batch, "aside": aside}):
        callback = MemoryBudget("1 GiB", **QUICK)
        rows = DataLoader([each], batch_size=None)  # type: ignore[arg-type]
        trainer(tmp_path, callback, max_steps=1).fit(Automatic(), rows)
        assert callback.plan is not None
        peaks.append(callback.plan.peak_bytes)
    assert peaks[1] - peaks[0] == aside.nbytes


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_that_workers_bring_early_are_in_the_budget(tmp_path: Path) -> None:
    def found(*callbacks: Any) -> Trained:
        rows: Any = DataLoader(
            Digits(),
            len(Digits()) // STEPS,
            num_workers=late.WORKERS,
            prefetch_factor=late.EACH,
            collate_fn=late.Late(STEPS),
        )
        module = Automatic()
        return trained(module, lambda: trainer(tmp_path, *callbacks).fit(module, rows))

    plain = found()
    callback = MemoryBudget(plain.budget_bytes, **QUICK)
    planned = found(callback)
    assert planned.is_bitwise(plain)
    assert callback.plan is not None
    assert planned.peak_bytes <= callback.plan.peak_bytes <= plain.budget_bytes


class Around(Automatic):
    """Calls the parts of its network, and not the network."""

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.model.head(self.model.blocks(batch["x"]))
        return functional.cross_entropy(logits, batch["labels"])


def test_a_step_around_the_network_is_an_error(tmp_path: Path) -> None:
    module = Around()
    with pytest.raises(ExecutionError, match="did not call Classifier"):
        trainer(tmp_path, MemoryBudget("1 GiB")).fit(module, loader())
    assert "forward" not in vars(module.model)


def test_one_model_has_one_budget(tmp_path: Path) -> None:
    both = MemoryBudget("1 GiB"), MemoryBudget("2 GiB")
    with pytest.raises(ValueError, match="Classifier has a budget already"):
        trainer(tmp_path, *both).fit(Automatic(), loader())
    module = Automatic()
    remat.fit(module.model, torch.ones(8, 64), budget="1 GiB", **QUICK)
    with pytest.raises(ValueError, match=r"remat\.release\(model\)"):
        trainer(tmp_path, both[0]).fit(module, loader())


def test_arguments_are_checked_at_the_door() -> None:
    with pytest.raises(UnitError, match="unknown unit"):
        MemoryBudget("24 XB")
    with pytest.raises(UnitError, match="give a budget"):
        MemoryBudget()
    with pytest.raises(TypeError, match="leave optimizer= out"):
        MemoryBudget("1 GiB", optimizer=None)
    wrong: dict[str, Any] = {"budgets": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'budgets'"):
        MemoryBudget("1 GiB", **wrong)
