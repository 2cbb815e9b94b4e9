"""One plan for many shapes: traced once, planned for the largest, judged at others."""

import copy
import dataclasses
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.errors import BudgetError, CaptureError, PlanMismatchError
from remat.planning.plan import Plan
from remat.torch_compat.attributes import storage_identity
from remat.training import region_backend
from remat.training.fitted_model import FittedModel, fitted_on
from remat.training.fitted_regions import FittedRegions
from remat.training.shape_ranges import ShapeRanges, checked_shapes

Batch = Mapping[str, Any]


class Layers(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, count: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding).square().mean()


class Rest(nn.Module):
    """Works on the rest of a table behind the batch: less memory for longer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(128, 32))
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean() + self.layers(self.table[: 128 - 2 * x.shape[1]])


class TwoWays(nn.Module):
    """Takes another way for odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 2:
            x = x.tanh()
        return self.layers(x)


class Fixed(nn.Module):
    """Takes the size for a number; the ops are the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self.scales = [1 / (1 + size) for size in range(65)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scales[x.shape[1]]


class Upsampling(nn.Module):
    """Twice as many pixels by arithmetic with floats: a condition pins the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Conv2d(3, 3, 3, padding=1, stride=stride) for stride in (1, 2, 1)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        larger = nn.functional.interpolate(self.layers(x), scale_factor=2)
        return larger.mean((2, 3)).square().mean()


class OverTime(nn.Module):
    """A loop over time: other ops for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x[:, 0]
        for t in range(1, x.shape[1]):
            hidden = self.cell(hidden).tanh() + x[:, t]
        return hidden.square().mean()


def batch_of(size: int, width: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(4, size, width, generator=generator)


def fitted(model: nn.Module) -> FittedModel:
    found = fitted_on(model)
    assert found is not None
    return found


def loss_of(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def outcome(model: nn.Module, batches: Iterable[Batch]) -> list[torch.Tensor]:
    """Return all that is left of backward passes whose gradients add up."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    losses: list[torch.Tensor] = []
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    copies = [t.detach().clone() for t in (*gradients, *model.buffers())]
    return [*losses, *copies, torch.get_rng_state()]


def assert_bitwise(model: nn.Module, plain: nn.Module, *batches: Batch) -> None:
    mine, theirs = outcome(model, batches), outcome(plain, batches)
    assert len(mine) == len(theirs)
    assert all(map(torch.equal, mine, theirs))


def peak_bytes(model: nn.Module, batch: Batch) -> int:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(model(**batch)).backward()

    return remat.measure(step, repeats=0, resident=[model, dict(batch)]).peak_bytes


def predicted_bytes(model: nn.Module, size: int) -> int:
    """Return the smallest peak that a known plan of the model has at a size."""
    planner = fitted(model).planner
    # These are counted in the graph.
    given = frozenset(map(storage_identity, [*model.parameters(), *model.buffers()]))
    found: list[int] = []
    for known in planner._sized.values():
        for (sizes, _), sized in known.items():
            at = tuple(size for _ in sizes)
            plan = planner._plan_at(sized, (at, 0), given, sized)
            found += [] if plan is None else [plan.peak_bytes]
    return min(found)


@dataclasses.dataclass
class Case:
    """A model that was fitted, what was planned, and a copy without remat."""

    model: nn.Module
    plain: nn.Module
    plan: Plan


def fit_case(model: nn.Module, **options: Any) -> Case:
    plain = copy.deepcopy(model)
    how: dict[str, Any] = {"costs": "estimated", "dynamic": {"x": {1: (2, 64)}}}
    plan = remat.fit(model, (), {"x": batch_of(20)}, **{**how, **options})
    return Case(model, plain, plan)


@pytest.fixture(scope="module")
def layers() -> Case:
    """A model for tests that change nothing of it but how often it was traced."""
    return fit_case(Layers(), budget="60%")


# --- one trace -----------------------------------------------------------------------


def test_one_trace_serves_all_sizes_bit_for_bit() -> None:
    layers = fit_case(Layers(), budget="60%")
    assert layers.plan.recomputed_op_count
    for size in (64, 2, 3, 17, 20, 63, 33):
        assert_bitwise(layers.model, layers.plain, {"x": batch_of(size)})
    assert fitted(layers.model).backend.training_step_count == 1
    assert fitted(layers.model).planner.planned_count == 1


def test_the_plan_is_for_the_largest_whatever_the_example() -> None:
    plans = [
        remat.plan(
            Layers(),
            batch_of(n),
            budget="60%",
            costs="estimated",
            dynamic={0: {1: (2, 64)}},
        )
        for n in (2, 64)
    ]
    static = remat.plan(Layers(), batch_of(64), budget="60%", costs="estimated")
    assert plans[0].fingerprint == plans[1].fingerprint
    assert {plan.budget_bytes for plan in plans} == {static.budget_bytes}
    assert {plan.baseline_peak_bytes for plan in plans} == {static.baseline_peak_bytes}


def test_the_caller_s_tensors_are_not_marked(layers: Case) -> None:
    x = batch_of(20)
    layers.model(x)
    assert not vars(x)


def transformer(name: str) -> tuple[nn.Module, Callable[[int], Batch], tuple[str, ...]]:
    transformers: Any = importlib.import_module("transformers")

    def text(size: int) -> Batch:
        generator = torch.Generator().manual_seed(size)
        ids = torch.randint(2, 100, (2, size), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, size // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    if name == "encoder":
        return Encoder(), padded, ("x", "padding")
    if name == "llama":
        llama = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=100,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(llama), text, tuple(text(2))
    if name == "bert":
        bert = transformers.BertConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            vocab_size=100,
        )
        return transformers.BertForMaskedLM(bert), text, tuple(text(2))
    t5 = transformers.T5Config(
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        vocab_size=100,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(t5), text, tuple(text(2))


def padded(size: int) -> Batch:
    padding = torch.zeros(4, size, dtype=torch.bool)
    padding[1, size // 2 :] = True
    return {"x": batch_of(size), "padding": padding}


@pytest.mark.parametrize("name", ["encoder", "llama", "bert", "t5"])
def test_transformers_keep_budget_and_bits_at_every_length(name: str) -> None:
    if name != "encoder":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, make, arguments = transformer(name)
    # Labels that T5 shifts by one are one word then, which is another trace.
    smallest = 3 if name == "t5" else 2
    model.train()
    plain = copy.deepcopy(model)
    plan = remat.fit(
        model,
        (),
        make(20),
        budget="85%",
        dynamic={argument: {1: (smallest, 64)} for argument in arguments},
    )
    assert plan.recomputed_op_count
    for size in (64, 33, 16, 5, smallest):
        assert_bitwise(model, plain, make(size))
        peak = peak_bytes(model, make(size))
        assert peak <= (plan.budget_bytes or 0)
        assert peak <= predicted_bytes(model, size)
    assert fitted(model).backend.training_step_count == 1


def test_two_hundred_lengths_are_one_trace_and_one_plan() -> None:
    torch.manual_seed(0)
    model = Encoder()
    plain = copy.deepcopy(model)
    remat.fit(
        model,
        (),
        padded(50),
        budget="70%",
        costs="estimated",
        dynamic={name: {1: (2, 201)} for name in ("x", "padding")},
    )
    for size in range(2, 202):
        assert_bitwise(model, plain, padded(size))
    planner = fitted(model).planner
    assert fitted(model).backend.training_step_count == 1
    assert planner.planned_count == 1


# --- the judge -----------------------------------------------------------------------


def test_smaller_sizes_that_need_more_are_planned_before_the_first_step() -> None:
    torch.manual_seed(0)
    model = Rest()
    plain = copy.deepcopy(model)
    plan = remat.fit(
        model, (), {"x": batch_of(20)}, budget="160%", dynamic={"x": {1: (2, 60)}}
    )
    assert not plan.recomputed_op_count
    planned_count = fitted(model).planner.planned_count
    assert planned_count > 1
    for size in (60, 30, 9, 2, 3):
        batch = batch_of(size)
        peak = peak_bytes(model, {"x": batch})
        assert peak <= (plan.budget_bytes or 0)
        assert_bitwise(model, plain, {"x": batch})
    store_all = remat.plan(plain, batch_of(2), budget="100%", costs="estimated")
    assert store_all.peak_bytes > (plan.budget_bytes or 0)


def test_a_budget_that_fits_the_largest_alone_is_refused() -> None:
    with pytest.raises(BudgetError, match="smallest known budget"):
        remat.fit(
            Rest(),
            (),
            {"x": batch_of(20)},
            budget="101%",
            costs="estimated",
            dynamic={"x": {1: (2, 60)}},
        )


def test_each_way_through_the_model_is_traced_and_planned_at_its_largest() -> None:
    model = TwoWays()
    plain = copy.deepcopy(model)
    remat.fit(
        model,
        (),
        {"x": batch_of(20)},
        budget="90%",
        costs="estimated",
        dynamic={"x": {1: (2, 64)}},
    )
    for size in (64, 33, 20, 5, 63, 4):
        assert_bitwise(model, plain, {"x": batch_of(size)})
    known = [list(plans) for plans in fitted(model).planner._sized.values()]
    assert known == [[((64,), 0)], [((63,), 0)]]


def test_gradients_of_earlier_passes_count_at_every_size() -> None:
    model = Layers()
    plain = copy.deepcopy(model)
    remat.fit(
        model,
        (),
        {"x": batch_of(20)},
        budget="75%",
        costs="estimated",
        dynamic={"x": {1: (2, 64)}},
        accumulate=True,
    )
    count = fitted(model).backend.training_step_count
    assert_bitwise(model, plain, *({"x": batch_of(n)} for n in (64, 30, 2, 17, 64)))
    assert fitted(model).backend.training_step_count == count
    assert fitted(model).planner.planned_count <= 2


def test_a_size_may_fit_onto_gradients_where_the_largest_does_not() -> None:
    model = Layers()
    plain = copy.deepcopy(model)
    how: dict[str, Any] = {"costs": "estimated", "dynamic": {"x": {1: (2, 64)}}}
    with pytest.raises(BudgetError) as refused:
        remat.plan(model, batch_of(20), budget="10%", **how)
    remat.fit(
        model, (), {"x": batch_of(20)}, budget=refused.value.required_bytes, **how
    )
    assert_bitwise(model, plain, {"x": batch_of(64)})
    assert_bitwise(model, plain, {"x": batch_of(8)}, {"x": batch_of(8)})
    outcome(model, [{"x": batch_of(64)}])
    with pytest.raises(BudgetError):
        model(x=batch_of(64))


@pytest.mark.filterwarnings("ignore:2 forward passes of Layers")
@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_passes_of_several_sizes_may_wait_for_their_backward(layers: Case) -> None:
    def gradients(called: nn.Module) -> list[torch.Tensor | None]:
        called.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        long, short = called(x=batch_of(64)), called(x=batch_of(9))
        long.backward(retain_graph=True)
        short.backward()
        long.backward()
        return [p.grad for p in called.parameters()]

    pairs = zip(gradients(layers.model), gradients(layers.plain), strict=True)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def test_other_modes_are_traced_once_for_all_sizes_too(layers: Case) -> None:
    model, plain = layers.model, layers.plain
    count = fitted(model).backend.training_step_count
    for module in (model, plain):
        module.eval()
    for size in (30, 64, 7):
        assert_bitwise(model, plain, {"x": batch_of(size)})
    assert fitted(model).backend.training_step_count == count + 1
    with torch.no_grad():
        assert torch.equal(model(batch_of(11)), plain(batch_of(11)))
    assert fitted(model).backend.training_step_count == count + 1
    for module in (model, plain):
        module.train()


def test_a_saved_plan_serves_all_sizes_again(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Layers()
    plain = copy.deepcopy(model)
    dynamic = {"x": {1: (2, 64)}}
    how: dict[str, Any] = {"costs": "estimated", "dynamic": dynamic}
    remat.plan(model, batch_of(20), budget="60%", **how).save(tmp_path / "plan.json")
    loaded = remat.load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError):
        remat.fit(model, batch_of(64), plan=loaded)
    remat.fit(model, (), {"x": batch_of(50)}, plan=loaded, dynamic=dynamic)
    for size in (64, 21):
        assert_bitwise(model, plain, {"x": batch_of(size)})
    assert fitted(model).planner.planned_count == 1


# --- sizes that the range or the trace is not for ------------------------------------


def test_sizes_out_of_range_are_planned_by_themselves_and_said(
    layers: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="remat"):
        assert_bitwise(layers.model, layers.plain, {"x": batch_of(70)})
    assert "70 in dimension 1 of 'x' is outside of 2 to 64" in caplog.text
    peak = peak_bytes(layers.model, {"x": batch_of(70)})
    assert peak <= (layers.plan.budget_bytes or 0)


def test_unequal_ranges_of_one_size_are_refused() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * scale

    with pytest.raises(CaptureError, match=r"from 2 to 64 and another from 2 to 32"):
        remat.fit(
            Product(),
            (torch.randn(20, 8), torch.randn(20, 8)),
            budget="90%",
            dynamic={"x": {0: (2, 64)}, "scale": {0: (2, 32)}},
        )


def test_a_size_of_one_is_a_step_of_its_own() -> None:
    model = Layers()
    plain = copy.deepcopy(model)
    remat.fit(
        model,
        (),
        {"x": batch_of(20)},
        budget="90%",
        costs="estimated",
        dynamic={"x": {1: (1, 64)}},
    )
    for size in (1, 64, 1):
        assert_bitwise(model, plain, {"x": batch_of(size)})
    assert fitted(model).backend.training_step_count == 2


def test_steps_that_cannot_vary_share_the_schedule_of_the_largest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Fixed()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, logger="remat"):
        plan = remat.fit(
            model, (), {"x": batch_of(20)}, budget="70%", dynamic={"x": {1: (2, 64)}}
        )
        for size in (64, 31, 2, 20):
            assert_bitwise(model, plain, {"x": batch_of(size)})
            assert peak_bytes(model, {"x": batch_of(size)}) <= (plan.budget_bytes or 0)
    assert plan.recomputed_op_count
    assert fitted(model).planner.planned_count == 1
    assert len(caplog.records) == 1
    assert "cannot be traced once for all sizes" in caplog.text
    assert "dimension 1 of 'x' from 2 to 64" in caplog.text


def test_sizes_that_conditions_pin_are_planned_for_the_largest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plan(size: int) -> remat.Plan:
        return remat.plan(
            Upsampling(),
            (torch.randn(2, 3, size, size),),
            budget="100%",
            costs="estimated",
            dynamic={"x": {2: (8, 32), 3: (8, 32)}},
        )

    with caplog.at_level(logging.WARNING, logger="remat"):
        plans = [plan(size) for size in (16, 32)]
    assert plans[0].budget_bytes == plans[1].budget_bytes
    assert "cannot be traced once for all sizes" in caplog.text


def test_steps_of_other_ops_are_planned_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = OverTime()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, logger="remat"):
        remat.fit(
            model,
            (),
            {"x": batch_of(3, 8)},
            budget="95%",
            costs="estimated",
            dynamic={"x": {1: (2, 5)}},
        )
        for size in (3, 5, 4):
            assert_bitwise(model, plain, {"x": batch_of(size, 8)})
    assert "the model fixes dimension 1 of" in caplog.records[0].message
    assert fitted(model).planner.planned_count == 3


# --- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dynamic", "error", "message"),
    [
        ({"y": {1: (2, 64)}}, ValueError, "dynamic names 'y', which is no argument of"),
        ({1: {1: (2, 64)}}, ValueError, "dynamic names 1, which is no argument of"),
        ({"x": {3: (2, 64)}}, ValueError, "dimension 3 of 'x', which has 3 dimensions"),
        ({"x": {1: (2, 19)}}, ValueError, "is 20 in the example, which is not within"),
        ({"x": {1: (21, 64)}}, ValueError, "is 20 in the example, which is not within"),
        ({"x": {1: (64, 2)}}, ValueError, "is from 64 to 2; it must be from 1 or more"),
        ({"x": {1: (0, 64)}}, ValueError, "is from 0 to 64; it must be from 1 or more"),
        ({"x": {1: (2, None)}}, ValueError, "has no upper end"),
        ({"x": {1: torch.export.Dim("n", min=2)}}, ValueError, "has no upper end"),
        ({"x": {1: (1, 1)}}, ValueError, "which is one size; leave it out"),
        ({"x": {1: 64}}, TypeError, r"it must be \(from, to\)"),
        ({"x": {1: (2, 6.5)}}, TypeError, "both ends must be whole numbers"),
        ({"x": {-1: (2, 64)}}, TypeError, "dimensions are counted from 0"),
        ({"x": {}}, TypeError, "must be a mapping from dimensions to ranges"),
        ({"x": (2, 64)}, TypeError, "must be a mapping from dimensions to ranges"),
        ({}, ValueError, "dynamic is empty"),
        ([("x", 1)], TypeError, "dynamic is a list; it must be a mapping"),
        ({"x": {1: (2, 64)}, 0: {0: (2, 8)}}, ValueError, "names argument 'x' twice"),
        ({"x": None}, ValueError, "dynamic is empty"),
        ({"x": [{1: (2, 64)}]}, TypeError, r"names x\[0\], and 'x' is a Tensor in"),
        ({"x": {"long": {1: (2, 64)}}}, TypeError, r"x\['long'\], and 'x' is a Tensor"),
        ({"x": [{1: 64}]}, TypeError, r"dynamic\['x'\]\[0\]\[1\] is 64; it must be"),
        ({"x": [64]}, TypeError, r"dynamic\['x'\]\[0\] is 64; it must be a mapping"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(
    dynamic: Any, error: type[Exception], message: str
) -> None:
    model = Layers()
    with pytest.raises(error, match=message):
        remat.fit(model, (), {"x": batch_of(20)}, budget="90%", dynamic=dynamic)
    assert fitted_on(model) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "fused"}, "leave kernels='fused' out"),
        ({"budget": {"cpu": "1 GiB", "cpu:1": "1 GiB"}}, "plans for one device"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, Any], message: str
) -> None:
    how: dict[str, Any] = {"budget": "90%", "dynamic": {"x": {1: (2, 64)}}, **options}
    with pytest.raises(ValueError, match=message):
        remat.fit(Layers(), batch_of(20), **how)


def test_the_backend_refuses_by_name() -> None:
    with pytest.raises(ValueError, match=r"dynamic= is for remat\.fit"):
        remat.backend(budget="1 GiB", dynamic={"x": {1: (2, 64)}})


# --- tensors in lists and mappings ---------------------------------------------------


class Boxes(nn.Module):
    """Finds boxes: each image of a batch has another number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.box, self.label = nn.Linear(32, 4), nn.Linear(32, 5)

    def forward(
        self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]
    ) -> torch.Tensor:
        features = self.features(torch.stack(images)).flatten(2).transpose(1, 2)
        loss = features.square().mean()
        for found, target in zip(features, targets, strict=True):
            distances = torch.cdist(target["boxes"], self.box(found))
            nearest = distances.min(1)
            labels = self.label(found[nearest.indices])
            loss = loss + nn.functional.cross_entropy(labels, target["labels"])
            loss = loss + nearest.values.mean()
        return loss


BOXES = {"boxes": {0: (2, 12)}, "labels": {0: (2, 12)}}


def images_with_boxes(*counts: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(sum(counts))
    images = [torch.randn(3, 16, 16, generator=generator) for _ in counts]
    return images, [
        {
            "boxes": torch.rand(count, 4, generator=generator),
            "labels": torch.randint(5, (count,), generator=generator),
        }
        for count in counts
    ]


@pytest.mark.parametrize("regions", ["whole", "breaks"])
def test_tensors_in_lists_and_mappings_vary(regions: Any) -> None:
    model = Boxes()
    plain = copy.deepcopy(model)
    remat.fit(
        model,
        images_with_boxes(5, 3),
        budget="150%",
        costs="estimated",
        regions=regions,
        dynamic={"targets": [BOXES, BOXES]},
    )
    count = None
    for counts in ((5, 3), (7, 12), (12, 2), (4, 4)):
        images, targets = images_with_boxes(*counts)
        losses = [each(images, targets) for each in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(gradient_of(one), gradient_of(other))
            one.grad = other.grad = None
        # Graphs are compiled as planned when they first run.
        count = count or fitted(model).backend.training_step_count
    assert fitted(model).backend.training_step_count == count
    assert fitted(model).planner.planned_count == 1
    report = remat.verify(
        Boxes(),
        images_with_boxes(5, 3),
        budget="100%",
        repeats=1,
        dynamic={"targets": [BOXES, None]},
    )
    assert report.is_exact
    assert "targets[0]['boxes'] [2, 4]" in report.shapes[0].shapes


class Emptying(Layers):
    """Takes its batch out of what holds it, and leaves something there."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Any) -> torch.Tensor:
        inner = x.pop("x")
        x["seen"] = 1
        x["all"].append(inner)
        return super().forward(inner)


@pytest.mark.parametrize("regions", ["whole", "breaks"])
def test_what_forward_does_to_lists_and_mappings_is_done(regions: Any) -> None:
    model = Emptying()
    remat.fit(
        model,
        ({"x": batch_of(20), "all": []},),
        budget="150%",
        costs="estimated",
        regions=regions,
        dynamic={"x": {"x": {1: (2, 64)}}},
    )
    for size in (20, 30):
        x, every = batch_of(size), list[torch.Tensor]()
        given = {"x": x, "all": every}
        model(given).backward()
        assert [*given] == ["all", "seen"]
        assert every[0] is x
        # Other compilers would read marks of the tracer.
        assert not vars(x)


class Either(nn.Module):
    """Goes another way where both arguments are one tensor, or writes to the first."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.layers = Layers(1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.writes:
            x.add_(1.0)
            return self.layers(y)
        return self.layers(x) if x is y else self.layers(x) + self.layers(y)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("regions", ["whole", "breaks"])
def test_one_tensor_given_twice_is_one(
    regions: Any, *, is_dynamic: bool, writes: bool
) -> None:
    model = Either(writes=writes).eval()
    plain = copy.deepcopy(model)
    dims = {1: (2, 64)}
    remat.fit(
        model,
        (batch_of(20), batch_of(20).neg()),
        budget="200%",
        costs="estimated",
        regions=regions,
        dynamic={"x": dims, "y": dims} if is_dynamic else None,
    )
    for is_one in (True, False, True):
        found: list[torch.Tensor] = []
        for each in (model, plain):
            x = batch_of(20)
            loss = each(x, x if is_one else batch_of(20).neg())
            loss.backward()
            found.append(loss)
        assert torch.equal(*found)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(gradient_of(one), gradient_of(other))
            one.grad = other.grad = None


@pytest.mark.parametrize(
    ("varying", "error", "message"),
    [
        ({0: (2, 20)}, TypeError, "targets', which holds several values"),
        (
            [{"masks": {0: (2, 20)}}],
            ValueError,
            r"targets\[0\]\['masks'\], which is not given .*: targets\[0\] holds 'boxes'",
        ),
        (
            [None, {"boxes": {2: (2, 20)}}],
            ValueError,
            r"targets\[1\]\['boxes'\], which has 2",
        ),
        ([{"boxes": {0: (7, 20)}}], ValueError, r"of targets\[0\]\['boxes'\] is 5 in"),
        (
            [{"boxes": {"x": {0: (2, 20)}}}],
            TypeError,
            r"and targets\[0\]\['boxes'\] is a Tensor",
        ),
    ],
)
def test_what_is_not_in_the_lists_is_refused(
    varying: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        remat.fit(
            Boxes(), images_with_boxes(5, 3), budget="90%", dynamic={"targets": varying}
        )


def test_what_a_call_is_given_is_listed_where_its_name_is_another() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, y: Any = None, **_: Any) -> torch.Tensor:
            return self.layer(x).square().mean()

    how: dict[str, Any] = {"budget": "100%", "dynamic": {"words": {0: (2, 8)}}}
    with pytest.raises(ValueError, match=r"'words', which .*, in which .* given 'x'$"):
        remat.fit(Named(), torch.randn(4, 32), **how)


def test_a_new_kind_of_step_is_told_with_what_lists_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Boxes()
    remat.fit(model, images_with_boxes(5, 3), budget="150%", costs="estimated")
    with caplog.at_level(logging.WARNING, logger="remat"):
        model(*images_with_boxes(4, 3)).backward()
    (said,) = (each.message for each in caplog.records if each.name == "remat")
    assert "[0]['boxes'] float32 [4, 4]" in said


class Graph:
    """A batch that is an object, as libraries have them."""

    def __init__(self, count: int) -> None:
        self.x = batch_of(count)[0]


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(1)

    def forward(self, graph: Graph) -> torch.Tensor:
        return self.layers(graph.x)


class OfMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(1)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(torch.cat(parts))


class Typed(Layers):
    def forward(self, x: torch.Tensor, kind: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.to(kind))


GIVEN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], str]] = {
    "tensors": (lambda: Layers(1), batch_of, "dynamic={'input_ids'"),
    # What holds no tensors varies in no size.
    "types": (
        lambda: Typed(1),
        lambda count: (batch_of(count), torch.float32),
        "dynamic={'input_ids'",
    ),
    "objects": (OfGraphs, Graph, "inside of a Graph"),
    "lists": (OfMany, lambda count: ([batch_of(9)] * (count - 7),), "equally many"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_ever_new_sizes_are_told_with_the_cure_that_works(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    make, given, cure = GIVEN[name]
    model = make()

    def train() -> None:
        for count in range(10, 20):
            model.zero_grad()
            batch = given(count)
            model(*(batch if isinstance(batch, tuple) else (batch,))).backward()

    remat.fit(model, given(9), budget="900%", costs="estimated")
    with caplog.at_level(logging.WARNING, logger="remat"):
        train()
    told = [each.message for each in caplog.records if each.name == "remat"]
    (said,) = (each for each in told if "each for other tensors" in each)
    assert cure in said
    if name != "objects":
        return
    assert "args[0].x of 5.00 KiB" in told[0]
    remat.fit(model, given(9), budget="900%", costs="estimated", regions="breaks")
    train()
    assert fitted(model).planner.planned_count <= 2


# --- with other options --------------------------------------------------------------


class Outer(Layers):
    """Returns what a loss outside reads: several tensors, so it is called again."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return {"first": x, "rest": [x.tanh()]}


TARGET = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))


def difference(outputs: Any) -> torch.Tensor:
    found = outputs["rest"][0]
    return nn.functional.mse_loss(found, TARGET[:, : found.shape[1]])


def test_a_loss_outside_is_planned_at_the_largest_size() -> None:
    how: dict[str, Any] = {"budget": "80%", "loss": difference, "costs": "estimated"}
    # The local search of "auto" also moves the ops for sizes, which only one graph has.
    how["solver"] = "min-cut-retention"
    model = Outer()
    plain = copy.deepcopy(model)
    plan = remat.fit(model, batch_of(20), dynamic={"x": {1: (2, 64)}}, **how)
    static = remat.plan(Outer(), batch_of(64), **how)
    for name in ("peak_bytes", "budget_bytes", "baseline_peak_bytes"):
        assert getattr(plan, name) == getattr(static, name)
    for size in (64, 3, 20):
        for each in (model, plain):
            torch.manual_seed(size)
            each.zero_grad()
            difference(each(batch_of(size))).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(gradient_of(one), gradient_of(other))
    assert fitted(model).backend.training_step_count == 1
    assert fitted(model).planner.planned_count == 1


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_a_loss_for_one_size_is_refused_with_what_to_write() -> None:
    class Plain(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layers[0](x)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, TARGET[:, :20])

    with pytest.raises(
        CaptureError, match=r"With dynamic= .* for as many as it is given"
    ):
        remat.plan(
            Plain(),
            batch_of(20),
            budget="100%",
            loss=loss,
            costs="estimated",
            dynamic={"x": {1: (2, 64)}},
        )


def test_the_largest_the_smallest_and_the_example_are_verified() -> None:
    report = remat.verify(
        Layers(), batch_of(20), budget="70%", repeats=1, dynamic={"x": {1: (2, 64)}}
    )
    assert report.is_exact
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01
    assert [shape.shapes for shape in report.shapes] == [
        "x [4, 2, 32]",
        "x [4, 20, 32]",
    ]
    assert all(shape.against_eager == () for shape in report.shapes)
    assert report.shapes[0].measured_peak_bytes < report.measured_peak_bytes
    assert "x [4, 20, 32]: " in str(report)
    broken = dataclasses.replace(
        report,
        shapes=(dataclasses.replace(report.shapes[0], measured_peak_bytes=2**40),),
    )
    assert not broken.is_within_budget
    assert "budget BROKEN" in str(broken)


def test_dimensions_of_torch_export_are_taken() -> None:
    length = torch.export.Dim("length", min=2, max=64)
    model = Layers()
    plain = copy.deepcopy(model)
    remat.fit(
        model,
        (),
        {"x": batch_of(20)},
        budget="90%",
        costs="estimated",
        dynamic={"x": {1: length}},
    )
    assert_bitwise(model, plain, {"x": batch_of(64)})
    assert fitted(model).backend.training_step_count == 1


def planned_peak_bytes(model: nn.Module) -> int:
    """Return the peak of the step that ran last, as planned."""
    plan = fitted(model).planner.running_plan
    assert plan is not None
    return plan.peak_bytes


# --- several graphs ------------------------------------------------------------------


def in_no_graph(function: Any) -> Any:
    """Return a function that the tracer leaves alone."""
    return torch.compiler.disable(function)


@in_no_graph
def squashed(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


class Split(Layers):
    """In two graphs, or in four equal blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        x = x + first(x)
        x = squashed(x + second(x))
        x = x + third(x)
        return (x + last(x)).square().mean()


@pytest.fixture(scope="module", params=["breaks", "blocks"])
def split(request: pytest.FixtureRequest) -> Case:
    return fit_case(Split(), budget="70%", regions=request.param)


def test_several_graphs_run_the_largest_ones_schedule_at_every_size(
    split: Case,
) -> None:
    static = remat.plan(
        Split(),
        batch_of(64),
        budget="70%",
        costs="estimated",
        regions=fitted(split.model).regions,
    )
    assert split.plan.recomputed_op_count
    for name in ("peak_bytes", "budget_bytes", "baseline_peak_bytes"):
        assert getattr(split.plan, name) == getattr(static, name)
    for size in (64, 33, 2):
        assert_bitwise(split.model, split.plain, {"x": batch_of(size)})
        peak = peak_bytes(split.model, {"x": batch_of(size)})
        assert peak <= (split.plan.budget_bytes or 0)
    assert fitted(split.model).planner.planned_count == 1
    count = fitted(split.model).backend.training_step_count
    with torch.no_grad():
        assert torch.equal(*(m.eval()(batch_of(9)) for m in (split.model, split.plain)))
    for model in (split.model, split.plain):
        model.train()
    assert_bitwise(split.model, split.plain, {"x": batch_of(33)})
    assert fitted(split.model).backend.training_step_count == count


def test_what_is_called_first_is_smaller_in_all_that_varies() -> None:
    asked = checked_shapes({"x": {0: (1, 4), 1: (8, 64)}})
    ranges = ShapeRanges.of(Layers(), asked)
    for rows, length, expected in (
        (4, 64, [(3, 63), (2, 8)]),
        (4, 20, [(3, 20), (2, 20)]),
        (3, 64, [(3, 63), (3, 8)]),
    ):
        calls = ranges.smaller((batch_of(64)[:rows, :length],), {})
        assert [call[0][0].shape[:2] for call in calls] == expected


@pytest.mark.parametrize("size", [20, 64])
@pytest.mark.parametrize("regions", ["breaks", "blocks"])
def test_what_is_named_for_several_graphs_works_at_every_size(
    regions: Any, size: int
) -> None:
    model = Split()
    how: dict[str, Any] = {
        "costs": "estimated",
        "regions": regions,
        "dynamic": {"x": {1: (2, 64)}},
    }
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, (), {"x": batch_of(size)}, budget=1, **how)
    named_bytes = caught.value.required_bytes
    remat.fit(model, (), {"x": batch_of(size)}, budget=named_bytes, **how)
    several = fitted(model)
    assert isinstance(several, FittedRegions)
    # Nothing is to be traced again, as all graphs are for all sizes.
    assert all(code.sizes for code in several._codes)
    for each in (20, 64, 33):
        model.zero_grad()
        model(x=batch_of(each)).backward()
        assert peak_bytes(model, {"x": batch_of(each)}) <= named_bytes
    assert several.planner.planned_count == 1


def test_a_model_that_cannot_be_called_with_less_is_planned_at_its_largest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Whole(Split):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] % 32:
                raise ValueError("no whole windows")
            return super().forward(x)

    with caplog.at_level(logging.WARNING, logger="remat"):
        model = Whole()
        plain = copy.deepcopy(model)
        dynamic = {"x": {1: (2, 64)}}
        how: dict[str, Any] = {"costs": "estimated", "regions": "breaks"}
        remat.fit(model, batch_of(64), budget="70%", dynamic=dynamic, **how)
    (said,) = caplog.messages
    assert "x [4, 2, 32]" in said
    assert "no whole windows" in said
    for size in (64, 32):
        assert_bitwise(model, plain, {"x": batch_of(size)})


def test_workspace_of_the_largest_size_is_none_of_a_smaller_one() -> None:
    """Notes of lengths let the tracer trace anew, here for a size of two."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
            self.lengths: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            note(self.lengths, x)
            x = torch.tanh(self.first(x))
            for _ in range(3):
                x = x + torch.tanh(self.norm(x.flatten(0, -2)).view_as(x))
            return x.square().mean()

    note = in_no_graph(lambda lengths, x: lengths.append(x.shape[1]))
    model, seen = Normed(), list[Any]()
    model.first.register_forward_hook(lambda *given: seen.append(given[2].shape[1]))
    how: dict[str, Any] = {"regions": "breaks", "dynamic": {"x": {1: (2, 40)}}}
    plan = remat.fit(model, torch.randn(4, 40, 32), budget="100%", **how)
    for size in (40, 17, 2, 33):
        model(torch.randn(4, size, 32)).backward()
    assert planned_peak_bytes(model) < plan.peak_bytes


def test_nothing_is_compiled_again_where_another_op_is_fullest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows gradients of parameters are largest, of many rows activations."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.last = nn.Linear(32, 512), nn.Linear(512, 32)
            self.first = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = squashed(torch.tanh(self.first(x)))
            return self.last(torch.tanh(self.wide(x))).square().mean()

    model = Wide()
    plain = copy.deepcopy(model)
    how: dict[str, Any] = {"regions": "breaks", "dynamic": {"x": {1: (2, 64)}}}
    plan = remat.fit(model, batch_of(64), budget="150%", costs="estimated", **how)
    monkeypatch.setattr(region_backend, "_LONG_S", 0.0)
    caplog.set_level(logging.INFO, logger="remat")
    assert_bitwise(model, plain, {"x": batch_of(64)})
    said = [each for each in caplog.messages if "compiled a graph of Wide" in each]
    assert len(said) == 2
    count = fitted(model).backend.training_step_count
    for size in (33, 9, 2):
        assert_bitwise(model, plain, {"x": batch_of(size)})
        peak = peak_bytes(model, {"x": batch_of(size)})
        assert peak <= planned_peak_bytes(model)
    assert peak < plan.peak_bytes
    assert fitted(model).backend.training_step_count == count


def test_a_saved_plan_of_several_graphs_is_installed_however_they_were_traced() -> None:
    dynamic = {"x": {1: (2, 64)}}
    plan = remat.plan(
        Split(),
        batch_of(20),
        budget="70%",
        costs="estimated",
        regions="breaks",
        dynamic=dynamic,
    )
    # As where its graphs were traced for all sizes at once.
    given = dataclasses.replace(plan, fingerprint="0" * 64)
    model = Split()
    plain = copy.deepcopy(model)
    with pytest.raises(PlanMismatchError):
        remat.fit(model, batch_of(64), plan=given, regions="breaks")
    with pytest.raises(PlanMismatchError):
        remat.fit(
            model,
            batch_of(20),
            plan=given,
            regions="breaks",
            dynamic={"x": {1: (2, 50)}},
        )
    installed = remat.fit(
        model, batch_of(20), plan=given, regions="breaks", dynamic=dynamic
    )
    assert installed.peak_bytes == plan.peak_bytes
    assert_bitwise(model, plain, {"x": batch_of(40)})


def test_several_graphs_of_a_size_that_needs_more_are_planned_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Rest):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rest = squashed(self.table[: 128 - 2 * x.shape[1]])
            return x.square().mean() + self.layers(rest)

    case = fit_case(
        Broken(), budget="160%", regions="breaks", dynamic={"x": {1: (10, 60)}}
    )
    assert not case.plan.recomputed_op_count
    with caplog.at_level(logging.WARNING, logger="remat"):
        for size in (60, 10, 60):
            assert_bitwise(case.model, case.plain, {"x": batch_of(size)})
            peak = peak_bytes(case.model, {"x": batch_of(size)})
            assert peak <= (case.plan.budget_bytes or 0)
    assert fitted(case.model).planner.planned_count == 2
    (said,) = caplog.messages
    assert "planned a new kind of step of Broken" in said
