"""What other ways of saving memory reach on the same models.

Each case is measured in a process of its own, which :mod:`studies.run` starts:
``checkpoint`` is ``torch.utils.checkpoint`` around every block (transformers' own
switch where the model has one), ``<backend>@<budget>`` is ``torch.compile`` with
``activation_memory_budget`` and that backend.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from studies.models import MODELS, Options
from studies.networks import Bottleneck, DenseLayer, DoubleConvolution
from studies.planned import Subject, make_step, paired_times, study_budget
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.verification import Outcome, compare

AOT = "aot_eager_decomp_partition"
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
CASES = (
    "checkpoint",
    *(f"{AOT}@{budget}" for budget in BUDGETS),
    *(f"inductor@{budget}" for budget in BUDGETS),
)
_BLOCKS = (Bottleneck, DenseLayer, DoubleConvolution)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)


def family(case: str) -> str:
    """Return what a case varies the budget of."""
    return case.partition("@")[0]


def study_peer(
    name: str, case: str, options: Options, repeats: int
) -> dict[str, Any]:
    """Measure peak, time and exactness of one peer on one model.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    workload = MODELS[name](options)
    step = make_step(workload)
    called = make_peer(case, workload.model)
    with step.restored():
        plain_peak_bytes = step.peak_bytes(None)
        eager = step.outcome(None, 1)
        found = step.outcome(called, 1)
        line = {
            "case": case,
            "status": "ok",
            "plain_peak_bytes": plain_peak_bytes,
            "measured_peak_bytes": step.peak_bytes(called),
            **_exactness(eager, found),
        }
        del eager, found
        return line | paired_times(step, called, repeats)


def study_same_peak(
    name: str, case: str, budget: int, options: Options, repeats: int
) -> dict[str, Any]:
    """Measure remat at the measured peak of a peer."""
    workload = MODELS[name](options)
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        return {"case": case, **study_budget(subject, budget, None, repeats)}


def make_peer(case: str, model: nn.Module) -> Any:
    """Return what to call instead of the model.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    if case == "checkpoint":
        return checkpointed(model)
    backend, _, budget = case.partition("@")
    if case not in CASES:
        msg = f"there is no peer {case!r}; there are {', '.join(CASES)}"
        raise ValueError(msg)
    import torch._functorch.config as functorch_config  # noqa: PLC0415
    import torch._inductor.config as inductor_config  # noqa: PLC0415

    functorch_config.activation_memory_budget = float(budget)
    # The same random numbers as eager, so that gradients can be compared.
    inductor_config.fallback_random = True
    return torch.compile(model._call_impl, backend=backend, dynamic=False)  # noqa: SLF001


def checkpointed(model: nn.Module) -> Callable[..., Any]:
    """Return the model's call with every natural block checkpointed.

    The model itself is as before between calls.

    Raises
    ------
    ValueError
        If the model has no blocks that this study knows.
    """
    switch = getattr(model, "gradient_checkpointing_enable", None)
    if switch is not None:
        return functools.partial(_call_with_switch, model)
    blocks = [block for block in model.modules() if isinstance(block, _BLOCKS)]
    chain = getattr(model, "features", None)
    if blocks:
        wrapped = {block: _checkpointed_forward(block) for block in blocks}
    elif isinstance(chain, nn.Sequential):
        wrapped = {chain: functools.partial(_run_stages, list(_stages(chain)))}
    else:
        msg = f"{type(model).__name__} has no blocks to checkpoint"
        raise ValueError(msg)
    return functools.partial(_call_with_forwards, model, wrapped)


def _call_with_switch(model: Any, *args: Any, **kwargs: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return model._call_impl(*args, **kwargs)  # noqa: SLF001
    finally:
        model.gradient_checkpointing_disable()


def _call_with_forwards(
    model: nn.Module,
    forwards: dict[nn.Module, Callable[..., Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    for block, forward in forwards.items():
        vars(block)["forward"] = forward
    try:
        return model._call_impl(*args, **kwargs)  # noqa: SLF001
    finally:
        for block in forwards:
            del vars(block)["forward"]


def _checkpointed_forward(block: nn.Module) -> Callable[..., Any]:
    return functools.partial(checkpoint, block.forward, use_reentrant=False)


def _stages(chain: nn.Sequential) -> Iterator[nn.Sequential]:
    """Cut a chain after each pooling layer."""
    stage: list[nn.Module] = []
    for layer in chain:
        stage.append(layer)
        if isinstance(layer, _POOLS):
            yield nn.Sequential(*stage)
            stage = []
    if stage:
        yield nn.Sequential(*stage)


def _run_stages(stages: list[nn.Sequential], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = checkpoint(stage, x, use_reentrant=False)  # pyright: ignore
    return x


def _exactness(expected: Outcome, found: Outcome) -> dict[str, Any]:
    """Compare with eager: what differs, and the gradients' largest relative error."""
    differing = {difference.name for difference in compare(expected, found)}
    errors = {
        name: _relative_error(expected[name], found[name])
        for name in differing
        if "gradient of" in name and name in found and name in expected
    }
    worst = max(errors, key=lambda name: errors[name], default=None)
    return {
        "compared_count": len(expected),
        "differing_count": len(differing),
        "differing_buffers": sorted(n for n in differing if "buffer" in n)[:4],
        "differing_buffer_count": sum("buffer" in name for name in differing),
        "differing_gradient_count": len(errors),
        "worst_gradient": worst,
        "gradient_error": errors[worst] if worst else 0.0,
        "is_random_state_equal": not any("random state" in n for n in differing),
    }


def _relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    distance = (expected.double() - found.double()).norm()
    return (distance / expected.double().norm().clamp_min(1e-30)).item()

