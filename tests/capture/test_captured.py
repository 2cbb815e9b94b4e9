"""What a loss reaches without being given it."""

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import remat
from remat.capture.captured import (
    captured_tensors,
    plain_tensors,
    reached_put_back,
)
from remat.training.fitted_model import fitted_on

global_target = torch.zeros(3)
module = types.ModuleType("settings")
module.target = torch.ones(3)  # pyright: ignore[reportAttributeAccessIssue] made here


def only(function: object) -> torch.Tensor:
    (found,) = captured_tensors(function)
    return found


def reads_global(out: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(out, global_target)


def with_default(
    out: torch.Tensor, target: torch.Tensor = global_target
) -> torch.Tensor:
    return functional.mse_loss(out, target)


def decorated(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def call(*args: Any) -> torch.Tensor:
        return function(*args)

    return call


class Slots:
    __slots__ = ("target",)

    def __init__(self) -> None:
        self.target = torch.zeros(3)


class Trainer:
    def __init__(self) -> None:
        self.target = torch.zeros(3)
        self.average_of_weights = torch.zeros(9)

    @property
    def current(self) -> torch.Tensor:
        return self.target

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, self.current)


def test_closures_defaults_bound_arguments_and_globals() -> None:
    y = torch.zeros(3)
    assert only(lambda out: functional.mse_loss(out, y)) is y
    assert only(functools.partial(functional.mse_loss, target=y)) is y
    assert only(with_default) is global_target
    assert only(reads_global) is global_target


def test_what_helpers_and_nested_functions_reach() -> None:
    y = torch.zeros(3)
    assert only(lambda out: 2 * reads_global(out)) is global_target
    assert only(decorated(reads_global)) is global_target
    assert only(lambda outs: sorted(outs, key=lambda out: (out - y).sum())) is y
    held = {"batch": [(y, 1)]}
    assert only(lambda out: out - held["batch"][0][0]) is y
    assert only(lambda out: out - module.target) is module.target


def test_attributes_that_the_code_names_and_no_others() -> None:
    trainer, slots = Trainer(), Slots()
    assert only(trainer.loss) is trainer.target
    assert only(lambda out: 2 * trainer.loss(out)) is trainer.target
    assert only(lambda out: out - slots.target) is slots.target


def test_a_module_counts_with_all_that_it_holds() -> None:
    criterion = nn.BCEWithLogitsLoss(weight=torch.ones(3), pos_weight=torch.ones(3))
    assert len(captured_tensors(lambda out: criterion(out, global_target))) == 3


def test_nothing_reaches_nothing() -> None:
    assert captured_tensors(None) == []
    assert captured_tensors(functional.cross_entropy) == []
    unassigned = types.CellType()

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out - unassigned.cell_contents

    assert captured_tensors(loss) == []


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.plain = torch.zeros(1)
        self.nested: dict[str, Any] = {
            "a": [torch.zeros(2), (torch.zeros(3),)],
            "b": None,
        }
        self.nested["itself"] = self.nested


def test_modules_hold_tensors_in_containers() -> None:
    model = Keeps()
    sizes = sorted(tensor.numel() for tensor in plain_tensors(model))
    assert sizes == [1, 2, 2, 3, 4]


class TestReached:
    class Object:
        def __init__(self) -> None:
            self.seen = deque[Any]([torch.ones(1)])
            self.count = [0]

        def hook(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            self.seen.append({"output": output})
            self.count.append(1)

    def test_what_hooks_and_functions_in_place_of_forward_collect(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        held, by_name, own = self.Object(), dict[int, Any](), model[1].forward
        before = held.seen[0]

        def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            by_name[len(by_name)] = input
            return own(input)

        model[0].register_forward_hook(held.hook)
        model[1].forward = forward
        with reached_put_back(model):
            model(torch.ones(1, 2))
            assert len(held.seen) == 2
            assert len(by_name) == 1
        assert [id(each) for each in held.seen] == [id(before)]
        assert by_name == {}
        assert held.count == [0]

    def test_a_class_of_its_own_and_a_module_that_is_no_part_may_collect(self):
        class Named(OrderedDict[str, Any]):
            def __init__(self, owner: str) -> None:
                super().__init__(owner=owner)

            def copy(self) -> Any:
                raise NotImplementedError

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.by_name, self.seen = Named("loss"), list[Any]()
                self.table, self.is_made = list[Any](), False

            def hook(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> None:
                self.by_name["output"] = out
                self.seen.append((out,))
                if not self.is_made:
                    self.table.append(torch.ones(2))
                    self.is_made = True

        model, loss = nn.Linear(2, 2), Loss()
        model.register_forward_hook(loss.hook)
        with reached_put_back(model):
            model(torch.ones(1, 2))
            assert len(loss.seen) == 1
        assert loss.seen == []
        # Else nobody would make it again.
        assert (loss.table, loss.is_made) == ([], False)
        assert list(loss.by_name.items()) == [("owner", "loss")]

    def test_all_stays_unless_something_is_foreign(self):
        model, seen, count = nn.Linear(2, 2), list[Any](), 0

        def hook(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
            nonlocal count
            count += 1
            seen.append(out)

        model.register_forward_hook(hook)
        for is_foreign, kept in ((None, 0), (torch.is_tensor, 0), (callable, 1)):
            count = 0
            with reached_put_back(model, is_foreign):
                model(torch.ones(1, 2))
                assert (len(seen), count) == (1, 1)
            assert (len(seen), count) == (kept, kept)

    def test_objects_with_ways_of_their_own_are_looked_at(self):
        class ByName(dict[str, Any]):
            def __getattr__(self, name: str) -> Any:
                return self[name]

        model, entries, large = nn.Linear(2, 2), ByName(seen=[]), [[]] * 20_000

        def hook(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
            entries.seen.append(out)
            entries["latest"] = out
            large.append([])
            large[0].append(1)

        model.register_forward_hook(hook)
        with reached_put_back(model):
            model(torch.ones(1, 2))
        assert entries == {"seen": []}
        assert len(large) == 20_000
        # It would take long to look into each of so many.
        assert large[0] == [1]

    def test_what_remat_has_installed_is_left_alone(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        x = torch.randn(2, 4)
        remat.fit(model, x, budget="100%", costs="estimated")
        fitted: Any = fitted_on(model)
        names, calls = list[str](), vars(fitted)["_call_count"]
        other = nn.Linear(4, 4)
        other.register_forward_hook(lambda *_: names.append(fitted.name))
        with reached_put_back(other):
            model(x)
        assert vars(fitted)["_call_count"] == calls + 1
