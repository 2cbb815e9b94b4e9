"""Private attributes of torch's objects, read and written by functions.

What each is needed for stands in :data:`remat.torch_compat.table.ATTRIBUTES`.
"""

import copy
import os
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from gc import get_referents
from itertools import pairwise
from math import prod
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo import eval_frame, symbolic_convert
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from remat.torch_compat import names
from remat.torch_compat.sharding import local_part

Call = Callable[..., Any]

_NodeOfPython = torch.autograd.function.BackwardCFunction

MODULE_STATE = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes in which a module keeps what belongs to it, each a dictionary."""


# --- modules and their calls ---------------------------------------------------------


def plain_call(module: nn.Module) -> Call:
    """Return the call of a module with its hooks, whatever is installed on it."""
    return module._call_impl


def installed_call(module: nn.Module) -> Call | None:
    """Return what runs in the place of a module's call, or ``None``."""
    return module._compiled_call_impl


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a module itself by name, as it keeps them."""
    return module._buffers


@contextmanager
def marked_dynamic(
    tensors: Iterable[tuple[torch.Tensor, Collection[int]]],
    given: Iterable[torch.Tensor],
) -> Generator[None]:
    """Let the tracer take dimensions of tensors for sizes that vary, inside only.

    The marks are attributes of the caller's tensors, and other compilers see them, too.
    So are marks of the tracer's own on whatever a call is ``given``.
    """
    before = [(tensor, _marks_of(tensor)) for tensor in given]
    try:
        for tensor, dims in tensors:
            names.maybe_mark_dynamic(tensor, [*dims])
        yield
    finally:
        for tensor, marks in before:
            for name in _marks_of(tensor):
                vars(tensor).pop(name, None)
            vars(tensor).update(marks)


def _marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the tracer reads of a tensor's own attributes."""
    return {
        name: copy.copy(value)
        for name, value in vars(tensor).items()
        if name.startswith(("_dynamo", "_has_dynamo"))
    }


def install_call(module: nn.Module, call: Call | None) -> None:
    """Run ``call`` in the place of a module's own call, as ``Module.compile`` does."""
    module._compiled_call_impl = call


def install_replication(module: nn.Module, replicate: Call) -> None:
    """Make the replicas of ``DataParallel`` by ``replicate``."""
    module._replicate_for_data_parallel = replicate


def uninstall_replication(module: nn.Module) -> None:
    """Make the replicas of ``DataParallel`` as torch makes them."""
    vars(module).pop("_replicate_for_data_parallel", None)


def replication_of(module: nn.Module) -> Call:
    """Return how the class of a module makes its replicas for ``DataParallel``."""
    return MethodType(type(module)._replicate_for_data_parallel, module)


def install_state(module: nn.Module, state: Call) -> None:
    """Let copies and files of a module hold what ``state`` returns."""
    vars(module)["__getstate__"] = state


def uninstall_state(module: nn.Module) -> None:
    """Let copies and files of a module hold what its class says."""
    vars(module).pop("__getstate__", None)


def plain_model(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` wraps, or the module itself."""
    return model._orig_mod if isinstance(model, names.OptimizedModule) else model


class Contents(NamedTuple):
    """What is inside of a model.

    Parameters
    ----------
    modules
        The model itself first, and those inside of it.
    parameters
        Those that are modules' own, shared ones repeatedly.
    are_hooked
        Whether any of the modules has hooks of its own.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    are_hooked: bool


def _modules_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and each module inside of it, once, as torch orders them."""
    waiting: list[nn.Module | None] = [model]
    found: set[nn.Module | None] = {None}
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found.add(module)
            yield module
            inside = module.__dict__["_modules"]
            if inside:
                waiting += [*inside.values()][::-1]


def contents_of(model: nn.Module) -> Contents:
    """Return what is inside of a model.

    At each call: by one walk, which looks each thing up where modules have it.
    """
    modules: list[nn.Module] = []
    parameters: list[nn.Parameter | None] = []
    are_hooked = False
    for module in _modules_in(model):
        modules.append(module)
        own = module.__dict__
        parameters += own["_parameters"].values()
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            are_hooked = True
    return Contents(
        modules, [each for each in parameters if each is not None], are_hooked
    )


def is_trained(model: nn.Module) -> bool:
    """Return whether a parameter of a module, or of those inside, is trained."""
    # At each call; most models have one among their first.
    for module in _modules_in(model):
        for parameter in module.__dict__["_parameters"].values():
            if parameter is not None and parameter.requires_grad:
                return True
    return False


def versions_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return how often each parameter was written, 0 where that is not counted."""
    try:
        return [parameter._version for parameter in parameters]
    except RuntimeError:
        # They were made in inference mode.
        return [0 if each.is_inference() else each._version for each in parameters]


def forward_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks before and after a module's forward, those of all modules too."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    yield from modules._global_forward_hooks.values()
    yield from modules._global_forward_pre_hooks.values()


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Return whether hooks may change what a module's forward is called with."""
    return bool(module._forward_pre_hooks or modules._global_forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own for its backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def are_backward_hooks_global() -> bool:
    """Return whether all modules have hooks for their backward pass."""
    return bool(modules._global_backward_hooks or modules._global_backward_pre_hooks)


def forward_hooks_of_all() -> tuple[int, ...]:
    """Return numbers of the hooks before and after the forward of every module."""
    return *modules._global_forward_hooks, *modules._global_forward_pre_hooks


def must_not_be_traced(hook: object) -> bool:
    """Return whether a hook says itself that no tracer may look into it."""
    return getattr(hook, "_torchdynamo_disable", False)


def active_wrapper() -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` whose forward is running, or ``None``."""
    return DistributedDataParallel._get_active_ddp_module()


def lays_out_buckets(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper will lay out its buckets as gradients come now."""
    is_fixed = wrapper.find_unused_parameters and not wrapper.static_graph
    return not is_fixed and not wrapper._has_rebuilt_buckets


def smallest_bucket_bytes(wrapper: DistributedDataParallel) -> int:
    """Return the bytes of the bucket in which a wrapper exchanges gradients first.

    It is smaller than the others, so that exchanging begins early.
    """
    return min(wrapper.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)


@contextmanager
def parametrizations_put_back() -> Generator[None]:
    """Let ``parametrize.cached`` keep none of what is computed inside."""
    before = dict(parametrize._cache)
    try:
        yield
    finally:
        parametrize._cache.clear()
        parametrize._cache.update(before)


_DEFAULT_STANCE = eval_frame.DynamoStance()
_set_override = getattr(eval_frame, "set_eval_frame_override", None)
_override = getattr(eval_frame, "_EvalFrameOverride", None)


def default_stance() -> AbstractContextManager[None]:
    """Let compiled calls do what they were compiled for.

    The stance is the whole process's: where another thread changed it meanwhile, it
    stays as that thread wants it. In torch 2.11 so is whether the tracer looks at what
    compiled code calls: whole graphs that run in two threads at once leave it off.
    """
    if _set_override is not None and _override is not None:
        _set_override(_override.NONE)
    # At each call, and hardly ever with another one.
    is_so = eval_frame._stance == _DEFAULT_STANCE
    return nullcontext() if is_so else _changed_stance()


@contextmanager
def _changed_stance() -> Generator[None]:
    changed = torch.compiler.set_stance("default")
    ours = eval_frame._stance
    try:
        yield
    finally:
        if eval_frame._stance is ours:
            changed.__exit__(None, None, None)


def trace_again(error: BaseException | None) -> None:
    """Let the tracer look again at the code that an error came through.

    It leaves out code that raised while it was traced, and never returns to it.
    """
    while error is not None:
        frame = error.__traceback__
        while frame is not None:
            eval_frame.reset_code(frame.tb_frame.f_code)
            frame = frame.tb_next
        error = error.__cause__


def is_raised_by_tracer(error: BaseException) -> bool:
    """Return whether an error was raised while the tracer followed code."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals is symbolic_convert.__dict__:
            return True
        frame = frame.tb_next
    return False


def tracer_is_off() -> bool:
    """Return whether nothing is compiled in this process."""
    # torch itself reads the variable when it compiles.
    off = os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"
    return off or names.dynamo_config.disable


# --- tensors -------------------------------------------------------------------------


def storage_identity(tensor: torch.Tensor) -> int:
    """Return what no other storage has, while the tensor's storage lives.

    Of a tensor in pieces, that is the storage of the piece of this process, and of a
    sparse one that of its values.
    """
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return storage_of(tensor)._cdata


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, of a sparse one that of its values.

    Raises
    ------
    NotImplementedError
        If it has none.
    """
    tensor = local_part(tensor)
    return (parts_of(tensor) or (tensor,))[-1].untyped_storage()


def has_hooks_of_its_gradient(tensor: torch.Tensor) -> bool:
    """Whether something runs when a gradient of a leaf was added up.

    As an optimizer that steps in backward, which changes the leaf.
    """
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None)) or hasattr(
        tensor, "_in_backward_optimizers"
    )


def has_hooks_before_its_gradient(tensor: torch.Tensor) -> bool:
    """Whether something runs when a gradient of a leaf is there, before it is added.

    As LOMO, which then changes all parameters whose gradients have been added before.
    """
    return tensor.is_leaf and tensor.requires_grad and bool(tensor._backward_hooks)


@contextmanager
def without_hooks_of_gradients(
    leaves: Iterable[torch.Tensor | None],
) -> Generator[None]:
    """Let no hook run inside that a leaf has for its gradient."""
    hooks = [leaf._backward_hooks for leaf in leaves if leaf is not None]
    kept = [(each, dict(each)) for each in hooks if each]
    for each, _ in kept:
        # The node of the leaf has the same mapping.
        each.clear()
    try:
        yield
    finally:
        for each, before in kept:
            each.update(before)


def overlapping_pair(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that share some bytes, if there are any."""
    spans: list[tuple[int, int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.layout is torch.strided:
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum(int((size - 1) * stride) for size, stride in pairs)
            begin = int(tensor.storage_offset()) * tensor.element_size()
            end = begin + length * tensor.element_size()
            spans.append((storage_identity(tensor), begin, end, name))
    spans.sort()
    for one, other in pairwise(spans):
        if one[0] == other[0] and other[1] < one[2]:
            return one[3], other[3]
    return None


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether a hook gets the gradient of a tensor, or the tensor retains it."""
    return tensor.retains_grad or bool(tensor._backward_hooks)


def block_lives(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return what says whether a tensor's block still exists, and does not hold it."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage, or of all storages of a sparse one."""
    parts = parts_of(local_part(tensor))
    return sum(part.untyped_storage().nbytes() for part in parts)


_COMPRESSED = (
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse one is made of, its values last, or itself.

    Nothing of one whose memory is its own affair, as of ``torch.Tensor.to_mkldnn``.
    """
    layout = tensor.layout
    if layout in (torch.strided, torch.jagged):
        return (tensor,)
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout not in _COMPRESSED:
        return ()
    tensor = tensor.detach()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a block was written in place, as far as autograd sees it.

    Tensors of inference mode have no count.
    """
    tensor = local_part(tensor)
    return 0 if tensor.is_inference() else tensor._version


def holder_count(tensor: torch.Tensor) -> int:
    """Return how many hold on to a tensor: Python as one, and code below of it."""
    return cast("Any", tensor)._use_count()


def storage_alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference is to, or ``None`` if it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def viewed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd knows a tensor to be a view of, or ``None``."""
    return tensor._base


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the view of another tensor that ``view`` is of its own base, unchecked."""
    return view._view_func_unsafe(base)


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written, as autograd counts it."""
    return tensor._version


def coordinate_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return indices and values of a sparse tensor in coordinates."""
    return [tensor._indices(), tensor._values()]


def is_compiled_step(node: object) -> bool:
    """Return whether a node of autograd's graph is the backward pass of a traced step.

    Its class is made anew for each step, and has no other mark than this.
    """
    if not isinstance(node, _NodeOfPython):
        return False
    return hasattr(cast("Any", node)._forward_cls, "_aot_id")


CAST_NODE = "ToCopyBackward0"
"""Kind of autograd's node of a cast."""

VIEW_NODES = frozenset(
    f"{name}Backward0"
    for name in [
        "Alias",
        "Diagonal",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "Transpose",
        "Unbind",
        "UnsafeSplit",
        "UnsafeView",
        "Unsqueeze",
        "View",
    ]
) | {"SqueezeBackward1"}
"""Kinds of autograd's nodes of operators that return views, no larger than it."""

LEAF_NUMBER = 2**64 - 1
"""The number of all nodes that add up gradients of leaves."""


def made_number(node: Any) -> int:
    """Return a number that is larger the later autograd made a node."""
    return node._sequence_nr()


def is_of_known_shapes(node: Any) -> bool:
    """Return whether a node takes gradients that are tensors of one size each."""
    return not any(
        each.is_nested_tensor or not all(isinstance(n, int) for n in each.shape)
        for each in node._input_metadata
    )


def gradient_shapes(node: Any) -> list[tuple[Any, torch.dtype, torch.device]]:
    """Return shape, type and device of the gradients that a node of autograd takes."""
    return [(each.shape, each.dtype, each.device) for each in node._input_metadata]


@contextmanager
def without_cast_gradients(tensors: Iterable[Any]) -> Generator[None]:
    """Take gradients of another type than their leaves' away inside.

    ``fully_shard`` leaves such of torch 2.15, which makes no fake tensors of them.
    """
    leaves = [t for t in tensors if isinstance(t, torch.Tensor) and t.is_leaf]
    found = [
        (leaf, leaf.grad)
        for leaf in leaves
        if leaf.grad is not None and leaf.grad.dtype != leaf.dtype
    ]
    for leaf, _ in found:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in found:
            leaf.grad = gradient


def made_bytes(node: Any) -> list[int]:
    """Return the bytes of each thing that the operator of a node of autograd returned.

    Of a leaf's node, those of the leaf. What a nested tensor is made of counts by
    itself.
    """
    return [
        0 if each.is_nested_tensor else prod(each.shape) * each.dtype.itemsize
        for each in node._input_metadata
    ]


def packed_tensors(node: Any) -> list[torch.Tensor]:
    """Return the tensors that a node of autograd keeps, as they are kept.

    Nothing is unpacked: no hook runs, and what was written in place since is no error.
    Parameters, and what shares their memory, are left out.
    """
    found: list[torch.Tensor] = []
    if isinstance(node, _NodeOfPython):
        _add_kept(found, [each.data for each in node._raw_saved_tensors or ()])
        _add_kept(found, vars(node))
        return found
    for name in _names_of_packed(type(node)):
        packed = getattr(node, name)
        if isinstance(packed, tuple):
            _add_kept(found, [each.data for each in packed])
        else:
            value = packed.data
            # In most nodes there is nothing else.
            if (
                type(value) is torch.Tensor
                and value.layout is torch.strided
                and value._base is None
            ):
                found.append(value)
            elif value is not None:
                _add_kept(found, value)
    return found


def _add_kept(found: list[torch.Tensor], value: Any) -> None:
    """Add the tensors that a value is or holds, as far as :data:`_DEEP`."""
    waiting, seen = [(value, 0)], set[int]()
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, torch.Tensor):
            is_resident = isinstance(item, nn.Parameter) or (
                isinstance(item._base, nn.Parameter)
            )
            if not is_resident and parts_of(local_part(item)):
                found.append(item)
        elif item is not None and depth <= _DEEP and id(item) not in seen:
            seen.add(id(item))
            waiting += [(each, depth + 1) for each in _held_by(item)]


_DEEP = 4
"""How deep in containers, objects and closures tensors are looked for."""

_OF_OTHERS = (type, ModuleType, nn.Module, _NodeOfPython)
"""Kinds of objects that a node refers to, and whose tensors are there without it."""


def _held_by(item: Any) -> list[Any]:
    """Return what is in a container, an object, or closed over by a function."""
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset | deque):
        return list(item)
    if isinstance(item, FunctionType):
        return [*(item.__closure__ or ()), *(item.__defaults__ or ())]
    if isinstance(item, CellType):
        return get_referents(item)
    # So are those of torch, such as a group of sharded parameters.
    is_own = not isinstance(item, _OF_OTHERS) and (
        type(item).__module__.partition(".")[0] != "torch"
    )
    # No attribute is asked for that may be computed.
    return list(vars(item).values()) if is_own and type(item).__dictoffset__ else []


@cache
def _names_of_packed(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradients a node of autograd adds up, or ``None``."""
    return None if isinstance(node, _NodeOfPython) else getattr(node, "variable", None)


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """Return the tensors that a node of autograd keeps for its backward pass."""
    kept = [name for name in dir(node) if name.startswith("_saved_")]
    found: list[Any] = [getattr(node, name) for name in kept]
    found.append(getattr(node, "saved_tensors", ()))
    return [leaf for leaf in names.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


# --- operators and graphs ------------------------------------------------------------


def schema_of(target: object) -> Any:
    """Return the schema of an operator, ``None`` of other functions."""
    return getattr(target, "_schema", None)


def traced_kernel(operator: Any) -> Call:
    """Return the Python kernel by which the tracer takes an operator apart."""
    return operator.py_kernels[names.DispatchKey.CompositeImplicitAutograd]


def composite_kernel(operator: Any) -> Call:
    """Return the kernel of an operator that is made of other operators."""
    return partial(operator._op_dk, names.DispatchKey.CompositeImplicitAutograd)


def root_of(graph: fx.Graph) -> fx.Node:
    """Return the node before the first of a graph."""
    return graph._root


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark code that takes its arguments in a list, and empties it."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def kernel_of(compiled: Any) -> Call:
    """Return the callable in what the compiler of kernels made, without checks."""
    return compiled.current_callable


# --- pipelines -----------------------------------------------------------------------


def loss_of_schedule(schedule: Any) -> Call | None:
    """Return the loss that the schedule of a pipeline was given, if it was."""
    return schedule._loss_fn
