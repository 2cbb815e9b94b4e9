"""Predict the memory of work outside the model: the optimizer's step and the loss.

Nothing runs on real data: copies on fake tensors are stepped while a dispatch mode
counts the bytes of the storages that are alive, plus the estimated scratch memory
inside each operator.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from remat.capture.accelerator import is_accelerated
from remat.capture.gradient_layouts import gradient_format
from remat.capture.outputs import FakeOutputs
from remat.capture.recurrent import REAL_RESULTS, RUNNABLE
from remat.core.errors import CaptureError
from remat.profile.arguments import describe, empty_like, tensors_in
from remat.profile.estimate import estimate_excess, estimate_workspace
from remat.profile.operators import OperatorCall, measured_workspace
from remat.profile.optimizer_copy import (
    OptimizerCopier,
    held_tensors,
    needed_arguments,
    period_of,
    stepping_optimizer,
)
from remat.profile.roofline import short_name
from remat.torch_compat.attributes import saved_tensors, storage_identity, viewed
from remat.torch_compat.names import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    local_scalar_dense,
    no_python_dispatcher,
    tree_map,
)
from remat.torch_compat.patches import (
    alone,
    as_if_not_tracing,
    foreach_of_fakes,
    patched,
)
from remat.torch_compat.sharding import Division, local_part

_TAKES_NEW_CONSTANTS = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)
_STEPS_TO_BEGIN = 8
"""RAdam rectifies from the sixth step on."""

_OF_MATRICES = ("linalg_", "_linalg_", "cholesky", "geqrf")
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_OF_FEW_BITS = frozenset({torch.bfloat16, torch.float16})
_SINGLE_BYTES = torch.float32.itemsize
_OPERANDS_OF_A_LOSS = 4
_SMALL_TENSORS_BYTES = 4096


class StorageCounter(TorchDispatchMode):
    """Count the bytes of the storages that operators create, as they come and go.

    Storages that exist before, or that are handed to :meth:`ignore`, do not count.
    A number read from a fake tensor is made up: it has no value.

    Parameters
    ----------
    mode
        The mode of the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._sizes: dict[int, int] = {}
        self._known: set[int] = set()
        # By storage: a real tensor that an operator took, and the fake in its place.
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        # Of operators that were measured, by what they are called with.
        self._workspaces: dict[str, int] = {}

    def size_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes counted for the storage of ``tensor``, 0 if it is not."""
        return self._sizes.get(storage_identity(tensor), 0)

    def real_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return one tensor for each real storage that an operator took."""
        return tuple(real for real, _ in self._taken.values())

    def restart(self) -> None:
        """Begin a new peak at what is live now."""
        self.peak_bytes = self.live_bytes

    def ignore(self, items: object) -> None:
        """Leave the storages of the tensors nested in ``items`` out of the count."""
        for tensor in tensors_in(items):
            self._known.add(storage_identity(local_part(tensor)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count the storages it made."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # Their own operators do it with their parts, and come here again.
            return NotImplemented
        if func is local_scalar_dense:
            return _made_up_number(args[0].dtype)
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs or {})
        if func not in _TAKES_NEW_CONSTANTS:
            inputs = tree_map(self._without_memory, inputs)
        old = {storage_identity(tensor) for tensor in tensors_in(inputs)}
        call = OperatorCall(func, *inputs)
        result = func(*call.args, **call.kwargs)
        if func in REAL_RESULTS:
            result = REAL_RESULTS[func](result, *call.args)
        excess_bytes = estimate_excess(call, result)
        for tensor in tensors_in(result):
            if storage_identity(tensor) not in old:
                self._count(tensor, excess_bytes)
                excess_bytes = 0
        workspace_bytes = max(
            estimate_workspace(call, result), self._library_workspace(call)
        )
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)
        return result

    def _library_workspace(self, call: OperatorCall) -> int:
        """Return the scratch memory of matrices and recurrent layers on CPUs.

        No rule is known for it, so it is measured, once for each shape.
        """
        name = short_name(call)
        tensors = tensors_in([call.args, dict(call.kwargs)])
        is_measured = (
            name.startswith(_OF_MATRICES)
            or call.target in RUNNABLE
            or (name in _PRODUCTS and tensors[0].dtype in _OF_FEW_BITS)
        )
        if not is_measured or is_accelerated() or tensors[0].device.type != "cpu":
            return 0
        key = describe(call.target, call.args, call.kwargs).text
        if key not in self._workspaces:
            target = RUNNABLE.get(call.target, call.target)
            self._workspaces[key] = measured_workspace(replace(call, target=target))
        return self._workspaces[key]

    def _without_memory(self, leaf: object) -> object:
        """Return the fake for a real tensor; what aliases it is not counted either."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        fake = self._mode.from_tensor(leaf)
        self._taken.setdefault(storage_identity(leaf), (leaf, fake))
        self.ignore(fake)
        return fake

    def _count(self, tensor: torch.Tensor, excess_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage_identity(tensor)
        if key in self._sizes or key in self._known:
            return
        size_bytes = storage.nbytes() + excess_bytes
        self._sizes[key] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def _made_up_number(dtype: torch.dtype) -> complex | float | bool:
    # Most numbers that optimizers read are counts of steps; a late step takes the
    # branches of the steady state (RAdam needs more memory there than at first).
    if dtype is torch.bool:
        return True
    if dtype.is_complex:
        return 1000 + 0j
    return 1000.0 if dtype.is_floating_point else 1000


def optimizer_bytes(
    optimizer: torch.optim.Optimizer,
    params: Iterable[torch.Tensor] | None = None,
    gradients: Mapping[int, Division] | None = None,
) -> tuple[int, int]:
    """Predict the memory of an optimizer: its state, and its step beyond that.

    A copy on fake tensors, each parameter with a gradient, is stepped; the optimizer
    itself is not touched. Of a wrapper that hands its steps on, such as accelerate's
    and Lightning's, it is the optimizer inside that is copied.

    Parameters
    ----------
    optimizer
        Any optimizer whose ``step`` needs no closure.
    params
        The parameters that receive a gradient; by default all of the optimizer's that
        require one.
    gradients
        By the id of a parameter, how its gradient is divided among processes if
        otherwise than itself.

    Returns
    -------
    state_bytes
        Bytes of the state once it is complete.
    step_workspace_bytes
        Most bytes in use during a later step beyond parameters, gradients and state.

    Raises
    ------
    CaptureError
        If the step needs a closure or values of tensors, so that it cannot be traced;
        the message names the optimizer and the error.

    Notes
    -----
    Two steps are taken: one that makes the state, and one that is measured. Where the
    optimizer does something every k steps only, k of each; ``_STEPS_TO_BEGIN`` at least
    where it is not torch's own. Whether steps differ is seen with one parameter of each
    shape and type.
    """
    trained = None if params is None else {id(param) for param in params}
    optimizer = stepping_optimizer(optimizer)
    name = type(optimizer).__name__
    needed = needed_arguments(optimizer)
    if needed:
        msg = (
            f"{name}.step() needs {', '.join(needed)}: a step that calls the model "
            "itself, perhaps several times, cannot be planned. Leave optimizer= out, and "
            "lower the budget by what it needs, or use one whose step() needs no closure"
        )
        raise CaptureError(msg)
    mode = FakeTensorMode()
    try:
        # Torch notes for all threads that there is a mode, and traces in none then.
        by_lists = partial(foreach_of_fakes, as_on_accelerator=is_accelerated())
        with patched(by_lists), as_if_not_tracing(), disable_current_modes(), mode:
            period = period_of(optimizer)
            if not type(optimizer).__module__.startswith("torch.optim"):
                # They may count their steps anywhere, and begin something later.
                period = max(period, _STEPS_TO_BEGIN)
            if period > 1:
                few = _one_of_each_kind(optimizer, trained)
                _, *later = _steps(optimizer, mode, few, gradients, period + 1)
                if len(set(later)) == 1:
                    period = 1
            *_, (state_bytes, _) = found = list(
                _steps(optimizer, mode, trained, gradients, 2 * period)
            )
            workspace_bytes = max(workspace for _, workspace in found[period:])
    # An optimizer is user code: its step may raise anything on fake tensors.
    except Exception as error:
        msg = (
            f"the memory of {name}.step() cannot be predicted without running it: "
            f"{type(error).__name__}: {str(error) or 'no reason given'}. Use an optimizer "
            "whose step() needs no closure and does not branch on values of tensors, give "
            "the one inside it that does the steps, or "
            "leave the optimizer out and lower the budget by what it needs"
        )
        raise CaptureError(msg) from error
    return state_bytes, workspace_bytes


def _one_of_each_kind(
    optimizer: torch.optim.Optimizer, trained: set[int] | None
) -> set[int]:
    """Return the ids of trained parameters, one per group, shape and type."""
    found: dict[Any, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad if trained is None else id(param) in trained:
                found.setdefault((number, param.shape, param.dtype), id(param))
    return set(found.values())


def _steps(
    optimizer: torch.optim.Optimizer,
    mode: FakeTensorMode,
    trained: set[int] | None,
    gradients: Mapping[int, Division] | None,
    count: int,
) -> Iterator[tuple[int, int]]:
    """Yield per step of a copy the bytes that it holds then, and took beyond before."""
    copier = OptimizerCopier(trained, gradients)
    copy = copier.copy(optimizer)
    if copier.are_divided:
        # The first of each operator on divided tensors is tried on whole ones, too.
        another = OptimizerCopier(trained, gradients).copy(optimizer)
        for _ in _counted(another, mode, count):
            pass
    yield from _counted(copy, mode, count)


def _counted(
    copy: torch.optim.Optimizer, mode: FakeTensorMode, count: int
) -> Iterator[tuple[int, int]]:
    counter = StorageCounter(mode)
    params_before = [p for g in copy.param_groups for p in g["params"]]
    counter.ignore([params_before, [p.grad for p in params_before]])
    counter.ignore([held_tensors(copy), list(tensors_in(copy.param_groups))])
    for _ in range(count):
        with counter:
            held_bytes = counter.live_bytes
            counter.restart()
            copy.step()
            workspace_bytes = counter.peak_bytes - held_bytes
        yield _unique_bytes(held_tensors(copy)), workspace_bytes


def _unique_bytes(items: object) -> int:
    parts = map(local_part, tensors_in(items))
    sizes = {storage_identity(t): t.untyped_storage().nbytes() for t in parts}
    return sum(sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """What a loss outside the model adds to the memory in use.

    Parameters
    ----------
    peak_bytes
        Most bytes in use at once while the loss and its gradients with respect to the
        outputs are computed, these gradients included, beyond the outputs.
    held_bytes
        Bytes that a training loop holds until its end: the loss value, behind which
        some losses keep a block of the outputs' size, and gradients of the loss's own
        parameters.
    saved_bytes
        Bytes in use, beyond the outputs, once the loss is computed and until its
        backward pass begins.
    forward_peak_bytes
        Most bytes in use at once until then.
    saves_outputs
        Whether it may keep the outputs for its backward pass, though nobody else does.
    read
        The real tensors that the loss reads, one for each storage: targets, weights,
        parameters of its own. They are there during the whole step.
    taken
        Positions, among the tensors of the outputs, of those that get a gradient.
    """

    peak_bytes: int
    held_bytes: int
    saved_bytes: int = 0
    forward_peak_bytes: int = 0
    saves_outputs: bool = True
    read: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)
    taken: frozenset[int] = field(default=frozenset(), compare=False)


def assumed_loss_bytes(outputs: Iterable[torch.Tensor]) -> LossMemory:
    """Return what a loss that nobody described is taken to need.

    A scalar that comes first is taken for the loss itself, computed inside the model.
    Otherwise the loss is taken to need four times its operand (a copy, the gradient,
    and two values in between), and to keep a block of that size behind its value. The
    operand is the outputs, in single precision if they have less: losses are mostly
    computed in single precision, under autocast always, and the copy that is made for
    it then comes on top.

    Parameters
    ----------
    outputs
        The outputs that take a gradient, fake or real, in the order in which the model
        returns them.

    Notes
    -----
    Enough for cross entropy (also with smoothing, weights or a shifted copy), squared,
    absolute, smooth and Huber losses, binary cross entropy, divergence, negative
    likelihood, Poisson without ``full``, soft margin, cosine, CTC and triplet losses,
    each measured. Hinge, multi-label soft margin, Gaussian likelihood, ranking margin
    and Poisson with ``full`` need up to ten times the operand.
    """
    held_bytes = copy_bytes = gradient_bytes = 0
    for position, output in enumerate(outputs):
        if position == 0 and output.dim() == 0:
            return LossMemory(peak_bytes=0, held_bytes=0)
        operand_bytes = output.numel() * max(output.element_size(), _SINGLE_BYTES)
        held_bytes += operand_bytes
        gradient_bytes += output.numel() * output.element_size()
        if output.element_size() < _SINGLE_BYTES:
            copy_bytes += operand_bytes
    if held_bytes == 0:
        return LossMemory(peak_bytes=0, held_bytes=0)
    peak_bytes = _OPERANDS_OF_A_LOSS * held_bytes + copy_bytes + _SMALL_TENSORS_BYTES
    return LossMemory(
        peak_bytes=peak_bytes,
        held_bytes=held_bytes,
        saved_bytes=peak_bytes - gradient_bytes,
    )


def loss_bytes(
    loss_fn: Callable[..., torch.Tensor],
    outputs: object,
    *args: object,
) -> LossMemory:
    """Predict the memory of a loss outside the model, and of its backward pass.

    Parameters
    ----------
    loss_fn
        Called as ``loss_fn(outputs, *args)``; returns a scalar that depends on a
        floating-point tensor of ``outputs``.
    outputs
        The model's outputs: a tensor or a nesting of tensors, fake or real, of which
        only shapes and types matter; or :func:`~remat.capture.outputs.fake_outputs`.
    args
        Further arguments, such as targets; real or fake, they do not count.

    Returns
    -------
    LossMemory
        Peak while the loss and its gradients are computed, what stays afterwards, the
        real tensors that are read, and which outputs get a gradient.

    Raises
    ------
    CaptureError
        If the loss needs values of tensors, so that it cannot be traced, or does not
        depend on the outputs.

    Notes
    -----
    The loss runs under the autocast that is on. No gradient of its own parameters is
    touched.
    """
    if not isinstance(outputs, FakeOutputs):
        outputs = _fake_outputs_like(outputs)
    counter = StorageCounter(outputs.mode)
    try:
        with (
            alone(),
            disable_current_modes(),
            # A trace around it would take other operators than those that really run.
            no_python_dispatcher(),
            outputs.mode,
            torch.enable_grad(),
            # It warns when it really runs.
            warnings.catch_warnings(action="ignore"),
        ):
            fake_args = cast("Sequence[Any]", _fake_like(args, needs_grad=False))
            counter.ignore([list(outputs.tensors), list(outputs.leaves), fake_args])
            with counter:
                loss = _scalar(loss_fn(outputs.value, *fake_args))
                saved_bytes = counter.live_bytes
                forward_peak_bytes = counter.peak_bytes
                saves_outputs = _saves(loss, outputs.tensors)
                taken = _taken(loss, outputs.tensors)
                own_gradients = _gradients(loss, outputs.leaves)
                held_bytes = counter.size_bytes(loss) + sum(
                    {
                        storage_identity(g): counter.size_bytes(g)
                        for g in own_gradients
                    }.values()
                )
    except CaptureError:
        raise
    # A loss is user code: it may raise anything on fake tensors.
    except Exception as error:
        msg = (
            "the memory of the loss cannot be predicted without running it: "
            f"{type(error).__name__}: {error}. Compute the loss inside the model, "
            "write it without operators and branches that depend on values of tensors, "
            "or leave loss= out: what it needs is then assumed"
        )
        raise CaptureError(msg) from error
    return LossMemory(
        peak_bytes=counter.peak_bytes,
        held_bytes=held_bytes,
        saved_bytes=saved_bytes,
        forward_peak_bytes=forward_peak_bytes,
        saves_outputs=saves_outputs,
        read=counter.real_tensors(),
        taken=taken,
    )


def _scalar(loss: object) -> torch.Tensor:
    """Return what a loss returned, if ``backward()`` can be called on it.

    Raises
    ------
    CaptureError
        If it is no tensor, or holds several numbers.
    """
    needed = "it must return the loss, a tensor of one number, for backward()"
    if not isinstance(loss, torch.Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__}"
        advice = ""
        if isinstance(loss, int | float):
            advice = "; leave out .item() and float()"
        elif loss is None:
            advice = "; it must not call backward() itself"
        msg = f"loss= returned {found}; {needed}{advice}"
        raise CaptureError(msg)
    if loss.numel() != 1:
        msg = (
            f"loss= returned a tensor of shape {tuple(loss.shape)}; {needed}: take the "
            "mean() or the sum(), or leave out reduction='none'"
        )
        raise CaptureError(msg)
    return loss


def _gradients(
    loss: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Do what ``loss.backward()`` does, and return the gradients of other leaves.

    The gradients of all leaves exist at once, as they do after a backward pass, but no
    leaf's ``grad`` is written: other leaves than the outputs are real parameters.
    """
    leaves = _leaves_behind(loss)
    known = {id(output) for output in outputs}
    if not any(id(leaf) in known for leaf in leaves):
        msg = (
            "loss= returned a tensor that does not depend on an output of the model "
            "that takes a gradient; it must be computed from the outputs, without "
            "detach() and torch.no_grad()"
        )
        raise CaptureError(msg)
    gradients = list(torch.autograd.grad(loss, leaves))
    for position, leaf in enumerate(leaves):
        gradients[position] = _in_the_layout_of(leaf, gradients[position])
    return [
        gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if id(leaf) not in known
    ]


def _taken(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the positions of the outputs from which a loss was computed."""
    behind = {id(leaf) for leaf in _leaves_behind(loss)}
    sources = [output if output.is_leaf else viewed(output) for output in outputs]
    return frozenset(n for n, source in enumerate(sources) if id(source) in behind)


def _saves(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a loss keeps a block of the outputs, behind it or as its own."""
    blocks = set(map(storage_identity, outputs))
    kept = [t for node in _nodes_behind(loss) for t in saved_tensors(node)]
    return any(storage_identity(tensor) in blocks for tensor in (loss, *kept))


def _leaves_behind(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that autograd would give a gradient."""
    if value.grad_fn is None:
        return [value] if value.requires_grad else []
    found = (getattr(node, "variable", None) for node in _nodes_behind(value))
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _nodes_behind(value: torch.Tensor) -> list[Any]:
    """Return autograd's nodes, from that of a value on."""
    waiting: list[Any] = [value.grad_fn]
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        waiting.extend(following for following, _ in node.next_functions)
    return list(seen)


def _in_the_layout_of(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as the step takes it, copied if its strides differ."""
    expected = gradient_format(leaf)
    if expected is not None:
        return gradient.contiguous(memory_format=expected)
    pairs = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    if all(one == other for length, one, other in pairs if length > 1):
        return gradient
    return torch.empty_like(leaf).copy_(gradient)


def _fake_outputs_like(outputs: object) -> FakeOutputs:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with disable_current_modes(), mode:
        value = _fake_like(outputs, needs_grad=True)
    tensors = tensors_in(value)
    return FakeOutputs(value=value, tensors=tensors, leaves=tensors, mode=mode)


def _fake_like(item: Any, *, needs_grad: bool) -> Any:
    """Return ``item`` with its tensors made again, fake; also inside model outputs."""

    def fake_leaf(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fake = empty_like(leaf)
        is_float = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        return fake.requires_grad_(needs_grad and is_float)

    return tree_map(fake_leaf, item)
