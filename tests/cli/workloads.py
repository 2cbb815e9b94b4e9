"""Training steps for the command line's tests; loaded as a script, like a user's."""

import functools
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(8) for _ in range(4)])


def remat_workload():
    """Everything a step can have; talks while it does."""
    sys.stdout.write("this is no data\n")
    model = make_model()
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    return {
        "model": model,
        "args": (x,),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda outputs: functional.mse_loss(outputs, y),
    }


def pair():
    return make_model(), torch.randn(64, 8)


def triple():
    return make_model(), (), {"input": torch.randn(64, 8)}


def thing():
    model = make_model()
    return SimpleNamespace(
        model=model,
        args=(torch.randn(64, 8),),
        make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )


def with_arguments():
    return make_model(), torch.randn(int(sys.argv[1]), 8)


def number():
    return 3


def model_alone():
    return make_model()


def misspelt():
    return {"model": make_model(), "arguments": ()}


def wrong_optimizer():
    return {"model": make_model(), "optimizer": "adam"}


def no_model():
    return "model", (1,)


def raising():
    return 1 // 0


def raising_in_torch():
    return nn.Linear(3, 4)(torch.randn(2, 5))


def needs_arguments(batch, width=3, *rest, depth, **more):
    return make_model(), batch


class NeedsArguments(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()


needs_arguments_bound = functools.partial(needs_arguments, depth=3)


def leaving():
    sys.exit("usage: me")


def interrupted():
    raise KeyboardInterrupt


@torch.library.custom_op("remat_tests::interrupted", mutates_args=())
def interrupted_op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def stop(context, gradient):
    raise KeyboardInterrupt


interrupted_op.register_fake(torch.empty_like)
interrupted_op.register_autograd(stop)


class InterruptedInBackward(Block):
    def forward(self, x):
        return interrupted_op(super().forward(x))


def interrupted_in_backward():
    return InterruptedInBackward(8), torch.randn(4, 8)


def frozen():
    return make_model().requires_grad_(False), torch.randn(64, 8)


def wrong_shape():
    return make_model(), torch.randn(64, 7)


not_callable = 7
