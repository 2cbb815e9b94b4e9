"""Estimate operator costs from shapes alone, over rates measured once per machine.

The time of an operator is ``launch + max(flops / rate, bytes / bandwidth)``, the
roofline [1]_, where bytes are those of the distinct tensors read and written. Its
scratch memory follows the rules of :func:`estimate_workspace`. No operator of the model
runs; shapes of outputs come from fake tensors.

References
----------
.. [1] S. Williams, A. Waterman, D. Patterson. Roofline: an insightful visual
   performance model for multicore architectures. CACM 52(4), 2009.
   https://doi.org/10.1145/1498765.1498785
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch.utils.flop_counter import flop_registry

from remat.capture.accelerator import hardware_now, is_accelerated
from remat.core.errors import ProfileError
from remat.profile.arguments import (
    ArgumentMaker,
    describe,
    target_name,
    tensors_in,
)
from remat.profile.cache import CostCache
from remat.profile.clock import operator_clock
from remat.profile.operators import OperatorCall, OperatorCost
from remat.profile.reductions import reduction_bytes
from remat.profile.roofline import WORKSPACES, Roofline, Rule, short_name
from remat.torch_compat.accelerators import (
    device_module,
    is_accelerator,
    release_library_blocks,
    resident_threads,
)
from remat.torch_compat.attributes import schema_of, storage_identity
from remat.torch_compat.names import FakeTensorMode, disable_current_modes

_MATMUL_SIDE = 768
_COPY_BYTES = 1 << 26
_SAMPLES = 5
_READS_ROWS = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators that read of their first argument no more than they make."""
_SHRUNK_RESULTS = frozenset(
    {
        "mse_loss",
        "smooth_l1_loss",
        "binary_cross_entropy",
        "soft_margin_loss",
        "col2im",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a device is.

    Parameters
    ----------
    flops_per_s
        Floating-point operations per second of a large float32 matrix product, at
        least 1.
    bytes_per_s
        Bytes read and written per second by a large copy, at least 1.
    launch_ns
        Time of an operator that does almost nothing, in nanoseconds, at least 0.
    """

    flops_per_s: int
    bytes_per_s: int
    launch_ns: int

    def __post_init__(self) -> None:
        if self.flops_per_s < 1 or self.bytes_per_s < 1 or self.launch_ns < 0:
            msg = (
                f"rates must be at least 1 and the launch at least 0; got {self}; "
                "measure them again with measure_rates"
            )
            raise ProfileError(msg)

    def time_ns(self, call: OperatorCall, flops: int, moved_bytes: int) -> int:  # noqa: ARG002
        """Return the time of one run in nanoseconds."""
        return self.launch_ns + max(
            math.ceil(flops * 1e9 / self.flops_per_s),
            math.ceil(moved_bytes * 1e9 / self.bytes_per_s),
        )


def measure_rates(
    device: torch.device | str = "cpu", *, cache: CostCache | None = None
) -> Rates:
    """Measure the rates of ``device`` with a matrix product and a copy.

    Parameters
    ----------
    device
        Where to measure; takes less than a second and about 140 MB there.
    cache
        Where the rates are looked up and kept; ``None`` for neither.
    """
    place = torch.device(device)
    key = f"rates of {place}"
    if is_accelerator(place):
        key += f" {device_module(place).get_device_name(place)}"
    known = None if cache is None else cache.look_up(key, Rates)
    if known is not None:
        return known
    with disable_current_modes(), torch.no_grad():
        matrix = torch.full((_MATMUL_SIDE, _MATMUL_SIDE), 0.5, device=place)
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=place)
        target = torch.empty_like(source)
        tiny = torch.zeros(1, device=place)
        matmul_ns = _fastest_ns(lambda: matrix @ matrix, place)
        copy_ns = _fastest_ns(lambda: target.copy_(source), place)
        launch_ns = _fastest_ns(tiny.neg, place)
    # No step that was planned may find more there than it had.
    release_library_blocks(place.type)
    rates = Rates(
        flops_per_s=round(2 * _MATMUL_SIDE**3 * 1e9 / matmul_ns),
        bytes_per_s=round(2 * _COPY_BYTES * 1e9 / copy_ns),
        launch_ns=launch_ns,
    )
    if cache is not None:
        cache.put(key, asdict(rates))
        cache.save()
    return rates


def _fastest_ns(run: Callable[[], object], device: torch.device) -> int:
    on_accelerator = is_accelerator(device)
    clock = time.perf_counter_ns if on_accelerator else operator_clock()
    times: list[int] = []
    for _ in range(_SAMPLES):
        start = clock()
        run()
        if on_accelerator:
            device_module(device).synchronize(device)
        times.append(max(1, clock() - start))
    return min(times)


def estimate_operators(
    calls: Sequence[OperatorCall], rates: Rates | Roofline
) -> list[OperatorCost]:
    """Estimate the cost of each call without running any.

    Parameters
    ----------
    calls
        Any number of calls; their tensors may be fake or real. Those whose outputs are
        not known are traced.
    rates
        Of the device that they would run on.

    Returns
    -------
    list[OperatorCost]
        One for each call, in order, with ``samples`` 0.

    Raises
    ------
    ProfileError
        If an operator cannot be traced on fake tensors.
    """
    known: dict[str, OperatorCost] = {}
    costs: list[OperatorCost] = []
    with disable_current_modes(), torch.no_grad():
        for call in calls:
            description = describe(call.target, call.args, call.kwargs)
            cost = known.get(description.text) if description.is_complete else None
            if cost is None:
                cost = _estimate(call, rates)
                known[description.text] = cost
            costs.append(cost)
    return costs


def _estimate(call: OperatorCall, rates: Rates | Roofline) -> OperatorCost:
    outputs = call.outputs
    if outputs is None:
        call, outputs = _trace(call)
    inputs = tensors_in([call.args, dict(call.kwargs)])
    of_inputs = {storage_identity(tensor) for tensor in inputs}
    seen = set(of_inputs)
    sizes: list[int] = []
    aliases_input = False
    for tensor in tensors_in(outputs):
        key = storage_identity(tensor)
        aliases_input = aliases_input or key in of_inputs
        held_bytes = tensor.untyped_storage().nbytes()
        sizes.append(0 if key in seen else held_bytes)
        seen.add(key)
    if sum(sizes):
        sizes[0] += estimate_excess(call, outputs)
    read_bytes = {storage_identity(t): _bytes(t) for t in inputs}
    if short_name(call) in _READS_ROWS:
        table = storage_identity(inputs[0])
        read_bytes[table] = min(read_bytes[table], sum(sizes))
    moved_bytes = sum(sizes) + sum(read_bytes.values())
    flops = 0
    if sum(sizes) or not aliases_input or _mutates(call):
        flops = _flops(call, outputs)
    else:
        moved_bytes = 0
    cost_ns = rates.time_ns(call, flops, moved_bytes)
    return OperatorCost(
        cost_ns=cost_ns,
        workspace_bytes=estimate_workspace(call, outputs),
        output_bytes=sum(sizes),
        output_sizes_bytes=tuple(sizes),
        aliases_input=aliases_input,
        samples=0,
        spread_ns=0,
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mutates(call: OperatorCall) -> bool:
    schema = schema_of(call.target)
    return bool(getattr(schema, "is_mutable", False))


def _trace(call: OperatorCall) -> tuple[OperatorCall, object]:
    """Return the call on fake tensors only, and its fake outputs."""
    try:
        with FakeTensorMode():
            # Made anew: the caller's tensors may belong to several fake modes.
            maker = ArgumentMaker(fill=None)
            args = maker.make(tuple(call.args))
            kwargs = maker.make(dict(call.kwargs))
            outputs = call.target(*args, **kwargs)
    # Any operator may raise anything on fake tensors; nothing else is in the block.
    except Exception as error:
        msg = (
            f"the cost of {target_name(call.target)} cannot be estimated: tracing it "
            f"on fake tensors raised {type(error).__name__}: {error}; profile the "
            "operators instead of estimating them"
        )
        raise ProfileError(msg) from error
    return OperatorCall(call.target, args, kwargs), outputs


def _flops(call: OperatorCall, outputs: object) -> int:
    grouped = _grouped_backward_flops(call)
    if grouped is not None:
        return grouped
    packet = getattr(call.target, "overloadpacket", call.target)
    formula = cast("dict[Any, Callable[..., int]]", flop_registry).get(packet)
    if formula is None:
        # One operation for each element made or read: bandwidth decides anyway.
        read = [] if short_name(call) in _READS_ROWS else [call.args, dict(call.kwargs)]
        tensors = tensors_in([read, outputs])
        return max((tensor.numel() for tensor in tensors), default=0)
    return int(formula(*call.args, **dict(call.kwargs), out_val=outputs))


def _grouped_backward_flops(call: OperatorCall) -> int | None:
    """Return the operations of the backward pass of a convolution in groups.

    ``None`` for all else. The formula of torch takes the gradient of the weight for
    that of a convolution without groups.
    """
    if short_name(call) != "convolution_backward":
        return None
    gradient, _, weight, *_, is_transposed, _, groups, needed = call.args
    if groups == 1 or is_transposed:
        return None
    once = 2 * gradient.numel() * weight.numel() // weight.shape[0]
    return once * sum(needed[:2])


def _reduces(inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    return bool(inputs and made) and made[0].numel() < inputs[0].numel()


def estimate_excess(call: OperatorCall, outputs: object) -> int:
    """Return the bytes that an output's storage has beyond what its shape needs.

    Some kernels, of CUDA as of the CPU, make their result in a larger block and shrink
    the tensor, not the block: losses that reduce their elements, and ``col2im``. Fake
    tensors do not show it.

    Parameters
    ----------
    call
        The operator and its arguments, fake or real.
    outputs
        What the call returns on fake tensors.
    """
    inputs = tensors_in([call.args, dict(call.kwargs)])
    made = tensors_in(outputs)
    if not _reduces(inputs, made):
        return 0
    if short_name(call) in _SHRUNK_RESULTS:
        return _bytes(inputs[0]) - _bytes(made[0])
    return 0


def estimate_workspace(call: OperatorCall, outputs: object) -> int:
    """Estimate the scratch memory of one run, in bytes, from shapes alone.

    The rules follow what torch's CPU kernels were seen to allocate for float32:

    * convolution: a copy of output and weight in the library's own layout; its
      backward: a copy of input, output gradient and weight, and the weight's gradient
      also where that of the bias alone is asked for;
    * dropout: the random numbers, as large as the input;
    * batch norm backward: a copy of the output gradient;
    * a loss that reduces its elements: the elements before reduction, unless the
      result lives in their block (:func:`estimate_excess`);
    * interpolation: a copy of input and output with channels last;
    * every other operator: none.

    While steps are traced for an accelerator, the rules are those of
    :data:`remat.profile.roofline.WORKSPACES`. Reductions on CUDA take what
    :func:`~remat.profile.reductions.reduction_bytes` says.

    Parameters
    ----------
    call
        The operator and its arguments, fake or real.
    outputs
        What the call returns on fake tensors.
    """
    name = short_name(call)
    inputs = tensors_in([call.args, dict(call.kwargs)])
    made = tensors_in(outputs)
    if name.startswith("upsample_") and "backward" not in name:
        name = "upsample"
    rule = (WORKSPACES if is_accelerated() else _WORKSPACE_RULES).get(name)
    if rule is None or not made:
        return reduction_bytes(call, _resident_threads(inputs))
    return rule(inputs, made) + _unasked_bytes(call)


def _resident_threads(inputs: Sequence[torch.Tensor]) -> int:
    """Return how many threads run at once on the CUDA device of a call, else 0."""
    hardware = hardware_now()
    if hardware is not None:
        return hardware.resident_threads if hardware.kind == "cuda" else 0
    return resident_threads(inputs[0].device) if inputs else 0


def _unasked_bytes(call: OperatorCall) -> int:
    """Return the bytes of what a kernel of the CPU computes beside what it is asked."""
    if short_name(call) != "convolution_backward" or is_accelerated():
        return 0
    _, of_weight, of_bias = call.args[-1]
    return _bytes(call.args[2]) if of_bias and not of_weight else 0


def _sum_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_bytes(tensor) for tensor in tensors)


def _elements_if_reduced(
    inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> int:
    return _bytes(inputs[0]) if _reduces(inputs, made) else 0


_WORKSPACE_RULES: dict[str, Rule] = {
    "convolution": lambda inputs, made: _bytes(inputs[1]) + _sum_bytes(made),
    "convolution_backward": lambda inputs, _: _sum_bytes(inputs[:3]),
    "native_dropout": lambda inputs, _: _bytes(inputs[0]),
    "native_batch_norm_backward": lambda inputs, _: _bytes(inputs[0]),
    "mse_loss": _elements_if_reduced,
    "smooth_l1_loss": _elements_if_reduced,
    "huber_loss": _elements_if_reduced,
    "soft_margin_loss_backward": lambda _, made: 2 * _bytes(made[0]),
    "logsumexp": lambda inputs, made: _bytes(inputs[0]) + _bytes(made[0]),
    "upsample": lambda inputs, made: _bytes(inputs[0]) + _sum_bytes(made),
}
