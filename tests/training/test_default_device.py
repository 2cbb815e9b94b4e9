"""What ``torch.set_default_device`` and other function modes say holds as before."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

import remat
from remat.core.errors import CaptureError
from remat.training.verification import compare

X = torch.randn(16, 32)


class Pair(nn.Module):
    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_broken = is_broken
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.blocks(x)
        if self.is_broken:
            torch._dynamo.graph_break()
        return hidden, hidden.tanh()


class Noted(TorchFunctionMode):
    """A mode that notes where tensors are made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ones
        return func(*args, **(kwargs or {}))


def modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


@pytest.fixture
def _on_cpu() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


def test_a_trace_inside_of_a_trace_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remat.fit(Pair(), X, budget="300%", loss=lambda outputs: outputs[1].sum())
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("regions", ["whole", "breaks", "blocks"])
def test_it_is_there_after_a_trace_inside_of_a_trace(regions: str) -> None:
    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[1].square().mean()

    plain, model = (Pair(is_broken=regions == "breaks") for _ in range(2))
    before = modes()
    assert [type(mode) for mode in before] == [DeviceContext]
    remat.fit(model, X, budget="300%", loss=loss, regions=regions)
    assert modes() == before
    for net in (plain, model):
        loss(net(X)).backward()
    assert modes() == before
    expected, found = (
        {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        for net in (plain, model)
    )
    assert len(expected) == 6
    assert not compare(expected, found)


def test_a_loss_is_measured_as_it_is_called() -> None:
    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(outputs[0], torch.ones(16, 32))

    with Noted() as noted:
        remat.fit(Pair(), X, budget="300%", loss=loss)
    assert noted.count


@pytest.mark.usefixtures("_on_cpu")
def test_errors_name_the_line_of_the_user() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            rows = self.layer(x)
            count = int(index.max()) + 1
            return rows.new_zeros((count, 32)).index_add(0, index, rows)

    batch = (X, torch.arange(16) % 4)
    with pytest.raises(CaptureError, match=r"count = int\(index\.max\(\)\)"):
        remat.fit(Reading(), batch, budget="100%", regions="whole")
