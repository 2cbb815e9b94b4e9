"""What other ways of saving memory reach on the same models.

Each case is measured in a process of its own, which :mod:`studies.run` starts:
``checkpoint`` is ``torch.utils.checkpoint`` around every block (transformers' own
switch where the model has one), ``checkpoint@<count>`` the same around so many
consecutive blocks at a time, ``<backend>@<budget>`` is ``torch.compile`` with
``activation_memory_budget`` and that backend.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.training.verification import Outcome, TrainingStep, compare
from studies.models import MODELS, Options
from studies.networks import (
    Bottleneck,
    DenseLayer,
    DoubleConvolution,
    Inception,
    PyramidPooling,
)
from studies.planned import Subject, make_step, paired_times, study_budget

AOT = "aot_eager_decomp_partition"
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
CASES = (
    "checkpoint",
    *(f"{AOT}@{budget}" for budget in BUDGETS),
    *(f"inductor@{budget}" for budget in BUDGETS),
)
_BLOCKS = (Bottleneck, DenseLayer, DoubleConvolution, Inception, PyramidPooling)
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)


def family(case: str) -> str:
    """Return what a case varies the budget of."""
    return case.partition("@")[0]


def study_peer(name: str, case: str, options: Options, repeats: int) -> dict[str, Any]:
    """Measure peak, time and exactness of one peer on one model.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    workload = MODELS[name](options)
    step = PeerStep(make_step(workload), make_peer(case, workload.model))
    with step.restored():
        plain_peak_bytes = step.peak_bytes(None)
        eager = step.outcome(None, 1)
        found = step.outcome(step.peer, 1)
        line = {
            "case": case,
            "status": "ok",
            "plain_peak_bytes": plain_peak_bytes,
            "measured_peak_bytes": step.peak_bytes(step.peer),
            **exactness(eager, found),
        }
        del eager, found
        return line | paired_times(step, step.peer, repeats)


def study_same_peak(
    name: str, case: str, budget: int, options: Options, repeats: int
) -> dict[str, Any]:
    """Measure remat at the measured peak of a peer."""
    workload = MODELS[name](options)
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        return {"case": case, **study_budget(subject, budget, None, repeats)}


@dataclass(frozen=True)
class Peer:
    """Another way to run a model.

    Parameters
    ----------
    call
        What to call instead of the model.
    switch
        Called with ``True`` before steps that this way runs, ``False`` before others.
        It stays on over the backward pass, where some models look at their settings.
    """

    call: Callable[..., Any]
    switch: Callable[[bool], object] = bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        return self.call(*args, **kwargs)


class PeerStep(TrainingStep):
    """A training step that runs plainly, as a peer does, or by a plan."""

    def __init__(self, plain: TrainingStep, peer: Peer) -> None:
        vars(self).update(vars(plain))
        self.peer = peer

    def call(self, called: Callable[..., Any] | None, number: int = 0) -> Any:
        """Run the forward pass."""
        self.peer.switch(called is self.peer)
        return super().call(called, number)


def make_peer(case: str, model: nn.Module) -> Peer:
    """Return a way to run the model.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    backend, _, budget = case.partition("@")
    if backend == "checkpoint":
        return checkpointed(model, int(budget or 1))
    if case not in CASES:
        msg = f"there is no peer {case!r}; there are {', '.join(CASES)}"
        raise ValueError(msg)
    return compiled(model, backend, float(budget))


def compiled(model: nn.Module, backend: str, budget: float) -> Peer:
    """Return the model compiled with a budget for what is kept between the passes."""
    import torch._functorch.config as functorch_config  # noqa: PLC0415
    import torch._inductor.config as inductor_config  # noqa: PLC0415

    functorch_config.activation_memory_budget = budget
    # The same random numbers as eager, so that gradients can be compared.
    inductor_config.fallback_random = True
    call: Callable[..., Any] = getattr(model, "_call_impl")  # noqa: B009
    return Peer(torch.compile(call, backend=backend, dynamic=False))


def checkpointed_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> Peer:
    """Return the model with the blocks that are given checkpointed, one by one."""
    call: Callable[..., Any] = getattr(model, "_call_impl")  # noqa: B009
    forwards: dict[nn.Module, Callable[..., Any]] = {
        block: functools.partial(checkpoint, block.forward, use_reentrant=False)
        for block in blocks
    }
    return Peer(call, functools.partial(_switch_forwards, forwards))


def checkpointed(model: nn.Module, count: int = 1) -> Peer:
    """Return the model with its natural blocks checkpointed.

    Parameters
    ----------
    model
        A transformer with a switch of its own, or a network of blocks.
    count
        Consecutive blocks of a chain that are recomputed together, at least 1. Layers
        outside of blocks form one up to each pooling.

    Raises
    ------
    ValueError
        If the model has no blocks that this study knows, or ``count`` is not possible.
    """
    call: Callable[..., Any] = getattr(model, "_call_impl")  # noqa: B009
    for word in ("activation", "gradient"):  # renamed within transformers 5
        if count == 1 and hasattr(model, f"{word}_checkpointing_enable"):
            return Peer(call, functools.partial(_switch_transformer, model, word))
    if count < 1:
        msg = f"{count} blocks cannot be checkpointed together; give at least 1"
        raise ValueError(msg)
    forwards: dict[nn.Module, Callable[..., Any]] = {
        chain: functools.partial(_run_groups, list(_groups(list(_units(chain)), count)))
        for chain in _chains(model)
    }
    if not forwards:
        msg = f"{type(model).__name__} has no blocks to checkpoint"
        raise ValueError(msg)
    return Peer(call, functools.partial(_switch_forwards, forwards))


def longest_chain(model: nn.Module) -> int:
    """Return how many blocks the longest chain of a model has, at least 1."""
    return max((len(list(_units(chain))) for chain in _chains(model)), default=1)


def _switch_transformer(model: Any, word: str, is_on: bool) -> None:  # noqa: FBT001
    if is_on:
        getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
        # Else each time adds a hook, which such checkpoints do not need.
        model.disable_input_require_grads()
    else:
        getattr(model, f"{word}_checkpointing_disable")()


def _switch_forwards(
    forwards: dict[nn.Module, Callable[..., Any]],
    is_on: bool,  # noqa: FBT001
) -> None:
    for block, forward in forwards.items():
        if is_on:
            vars(block)["forward"] = forward
        else:
            vars(block).pop("forward", None)


def _chains(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks and sequences that hold convolutions."""
    for child in module.children():
        if isinstance(child, _BLOCKS):
            yield child
        elif not isinstance(child, nn.Sequential):
            yield from _chains(child)
        elif any(isinstance(layer, _CONVOLUTIONS) for layer in child.modules()):
            yield child


def _units(chain: nn.Module) -> Iterator[list[Callable[..., Any]]]:
    """Cut a chain into blocks; other layers form one up to each pooling."""
    if isinstance(chain, _BLOCKS):
        # Its own call is what is replaced.
        yield [chain.forward]
        return
    layers: list[Callable[..., Any]] = []
    for layer in chain.children():
        if isinstance(layer, _BLOCKS) and layers:
            yield layers
            layers = []
        layers.append(layer)
        if isinstance(layer, (*_BLOCKS, *_POOLS)):
            yield layers
            layers = []
    if layers:
        yield layers


def _groups(
    units: list[list[Callable[..., Any]]], count: int
) -> Iterator[list[Callable[..., Any]]]:
    for start in range(0, len(units), count):
        yield [layer for unit in units[start : start + count] for layer in unit]


def _run_groups(groups: list[list[Callable[..., Any]]], x: torch.Tensor) -> Any:
    for group in groups:
        x = checkpoint(_run, group, x, use_reentrant=False)
    return x


def _run(layers: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def exactness(expected: Outcome, found: Outcome) -> dict[str, Any]:
    """Compare with eager: what differs, and relative errors of the gradients.

    That of all parameters together is the one to trust: a gradient that is 0 but for
    rounding, such as that of a bias of attention's keys, is never close to another.
    """
    differing = {difference.name for difference in compare(expected, found)}
    errors = {
        name: _relative_error(expected[name], found[name])
        for name in differing
        if "gradient of" in name and name in found and name in expected
    }
    worst = max(errors, key=lambda name: errors[name], default=None)
    gradients = [name for name in expected if "gradient of" in name and name in found]
    return {
        "overall_gradient_error": _relative_error(
            _joined(expected, gradients), _joined(found, gradients)
        ),
        "compared_count": len(expected),
        "differing_count": len(differing),
        "differing_buffers": sorted(n for n in differing if "buffer" in n)[:4],
        "differing_buffer_count": sum("buffer" in name for name in differing),
        "differing_gradient_count": len(errors),
        "worst_gradient": worst,
        "gradient_error": errors[worst] if worst else 0.0,
        "is_random_state_equal": not any("random state" in n for n in differing),
    }


def _joined(outcome: Outcome, names: list[str]) -> torch.Tensor:
    return torch.cat([outcome[name].reshape(-1) for name in names])


def _relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    distance = (expected.double() - found.double()).norm()
    return (distance / expected.double().norm().clamp_min(1e-30)).item()
