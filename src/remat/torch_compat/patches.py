"""Torch changed for a moment: one lock, one context manager, off when tracing is over.

What is changed belongs to the whole process. So only one thread changes it at a time,
under the lock that ``torch.compile`` takes to trace: what other threads compile never
sees it, and threads that run compiled steps do not look there. The exception,
:class:`ThreadKernels`, changes no result of others.
"""

import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import fx

from remat.torch_compat.attributes import composite_kernel
from remat.torch_compat.names import (
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    FakeTensorMode,
    GradAOTOutput,
    MemoryFormatMeta,
    OpOverload,
    PlainAOTInput,
    compile_lock,
    dynamo_config,
    dynamo_utils,
    exclude_dispatch_keys,
    foreach_devices,
    foreach_types,
    function_modes_aside,
    graph_capture_wrappers,
    guards,
    has_kernel_for_key,
    no_tracing,
    optimize,
)
from remat.torch_compat.sharding import Division, division_of

Patch = Callable[[], Callable[[], None]]
"""Changes torch, and returns what changes it back."""

Entered = AbstractContextManager[None]
"""What is entered for a moment."""

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""The keys under which the tracer finds what takes an operator apart."""


@contextmanager
def alone() -> Generator[None]:
    """Trace in one thread at a time; a thread may enter again."""
    with compile_lock:
        yield


@contextmanager
def patched(*patches: Patch) -> Generator[None]:
    """Trace with changes to torch, in one thread at a time."""
    with alone(), ExitStack() as undo:
        for patch in patches:
            undo.callback(patch())
        yield


@contextmanager
def tracer_settings(**changes: Any) -> Generator[None]:
    """Give settings of the tracer other values, to be entered while :func:`alone`.

    They are the thread's own, but in torch 2.11, where all threads share them.
    ``torch._dynamo.config.patch`` does the same, and each use of it leaves a variable
    in the thread's context for good, which is no way to call a model.
    """
    before = {name: getattr(dynamo_config, name) for name in changes}
    changed = {name: each for name, each in changes.items() if each != before[name]}
    try:
        for name, value in changed.items():
            setattr(dynamo_config, name, value)
        yield
    finally:
        for name in changed:
            setattr(dynamo_config, name, before[name])


def foreach_of_fakes(*, as_on_accelerator: bool) -> Callable[[], None]:
    """Patch optimizers to step fake tensors by lists where they would real ones.

    Each has a default of its own, which most look up by type and device. Steps of
    others' optimizers in other threads see no other devices.
    """
    own = threading.get_ident()

    def devices() -> list[str]:
        is_other = not as_on_accelerator or threading.get_ident() != own
        return foreach_devices() if is_other else [*foreach_devices(), "cpu"]

    def undo() -> None:
        foreach_types.remove(FakeTensor)
        setattr(torch_optimizer, foreach_devices.__name__, foreach_devices)

    foreach_types.append(FakeTensor)
    setattr(torch_optimizer, foreach_devices.__name__, devices)
    return undo


@contextmanager
def callers_function_modes() -> Generator[None]:
    """Run what a caller wrote, or trace it, inside of a trace as outside of it.

    While torch traces, it puts function modes aside, such as that of
    ``torch.set_default_device``, and has one place for them: a trace inside of the
    first finds no mode, and when it ends, those of the first are lost for good.
    """
    outside = function_modes_aside.stack
    if not outside:
        yield
        return
    try:
        with function_modes_aside.temp_restore_stack():
            yield
    finally:
        function_modes_aside.stack = outside


@contextmanager
def _events_kept() -> Generator[None]:
    """Let the events that a trace has begun end without a warning that they never did.

    In torch 2.11 a trace inside of another clears them.
    """
    log = dynamo_utils.get_chromium_event_logger()
    stacks = (log.get_stack(), log.get_pt2_compile_substack())
    begun = [list(stack) for stack in stacks]
    try:
        yield
    finally:
        for stack, before in zip(stacks, begun, strict=True):
            stack[:] = before


class _Within:
    """What the tracer calls for each piece of code that is new, inside of a context."""

    def __init__(
        self, convert: Callable[..., Any], around: Callable[[], Entered]
    ) -> None:
        # The tracer goes from one to the next to find the compiler at the end.
        self._torchdynamo_orig_backend = convert
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with callers_function_modes(), _events_kept(), self._around():
            return self._torchdynamo_orig_backend(*args, **kwargs)


def compiled_within(
    function: Callable[..., Any],
    compiler: Callable[..., Any],
    around: Callable[[], Entered],
    *,
    fullgraph: bool = False,
) -> Callable[..., Any]:
    """Return what ``torch.compile`` does, with each trace inside of a context.

    Calls of what was traced before do not enter it.

    Parameters
    ----------
    function, compiler, fullgraph
        As ``model``, ``backend`` and ``fullgraph`` of ``torch.compile``, for static
        shapes.
    around
        Returns the context.
    """

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compiler(module, inputs)

    context: Any = optimize(backend=compile_graph, nopython=fullgraph, dynamic=False)
    context.callback = _Within(context.callback, around)
    return context(function)


def untimed_guards() -> Callable[[], None]:
    """Patch traces to end without a timing of their guards, which takes 20 ms of each.

    Torch empties the processor's caches for it, and writes the time to its log.
    """
    timed = guards.profile_guard_manager
    guards.profile_guard_manager = _no_time

    def undo() -> None:
        guards.profile_guard_manager = timed

    return undo


def _no_time(*_guards: Any) -> float:
    return 0.0


def unlogged_settings() -> Callable[[], None]:
    """Patch traces to leave the tracer's settings out of torch's records of them.

    Torch 2.11 cannot write functions there, and logs an error with a traceback, which
    holds the values of all callers as long as somebody keeps the log.
    """
    written = dynamo_utils._get_dynamo_config_for_logging
    dynamo_utils._get_dynamo_config_for_logging = _no_settings

    def undo() -> None:
        dynamo_utils._get_dynamo_config_for_logging = written

    return undo


def _no_settings() -> None:
    return None


def hooks_looked_for() -> Callable[[], None]:
    """Patch traces to leave looking for hooks to whoever runs the code.

    Six guards for each module are a tenth of what it takes to call a small step. They
    are left out for modules that are found through their registration alone, from the
    one whose method is run: whoever looks through what is registered then finds them.
    """
    builder = guards.GuardBuilder
    original = builder.EMPTY_NN_MODULE_HOOKS_DICT

    @wraps(original)
    def guard_hooks(self: Any, guard: Any) -> None:
        if not _OF_REGISTERED.fullmatch(guard.name):
            original(self, guard)

    def undo() -> None:
        builder.EMPTY_NN_MODULE_HOOKS_DICT = original

    builder.EMPTY_NN_MODULE_HOOKS_DICT = guard_hooks
    return undo


# As the tracer writes it, where what is run is called so.
_OF_REGISTERED = re.compile(
    r"L\['run'\]\.__self__"
    r"(?:\._modules\[(?:'[^'\\]*'|\"[^\"\\]*\")\])*"
    r"\._\w+_hooks(?:_with_kwargs)?"
)

MOST_RESULTS = 20_000
"""How many results on fake tensors are remembered; of one kind and shape each."""

_results: dict[Any, dict[Any, Any]] = {}
# By what else they depend on; torch's own are not among them.


def fake_results(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Return a patch that wraps what runs an operator on fake tensors.

    What was found for the operators of torch is remembered for the next trace, apart
    from what torch remembers itself: a quarter of a trace is to find it again.

    Parameters
    ----------
    wrap
        From torch's function of the mode, the operator, its types, arguments and
        keywords to one in its place, whose results depend on nothing else.
    """

    def patch() -> Callable[[], None]:
        dispatch, theirs = FakeTensorMode._dispatch_impl, FakeTensorMode.cache
        ours = _results.setdefault((wrap, dispatch, _kernel_settings()), {})
        FakeTensorMode._dispatch_impl = wrap(dispatch)
        FakeTensorMode.cache = ours

        def undo() -> None:
            FakeTensorMode._dispatch_impl = dispatch
            FakeTensorMode.cache = theirs
            # Others are remembered by objects that may go, and their place be reused.
            for key in [key for key in ours if not _is_of_torch(key.key[0])]:
                del ours[key]
            if sum(map(len, _results.values())) > MOST_RESULTS:
                _results.clear()
            if len(theirs) > MOST_RESULTS:
                FakeTensorMode.cache_clear()

        return undo

    return patch


def _is_of_torch(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and operator.namespace == "aten"


def _kernel_settings() -> tuple[object, ...]:
    """Return what decides about kernels, and so about layouts, beside the arguments."""
    backends = torch.backends
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
    )


def gradient_formats(
    expected: Callable[[torch.Tensor], torch.memory_format | None],
) -> Patch:
    """Return a patch that says in which format gradients of outputs are expected.

    Parameters
    ----------
    expected
        From an output to the format, ``None`` for what torch expects.
    """

    def patch() -> Callable[[], None]:
        descriptor = vars(MemoryFormatMeta)["from_tensor"]
        original = MemoryFormatMeta.from_tensor

        def from_tensor(
            t: torch.Tensor, *args: Any, **kwargs: Any
        ) -> MemoryFormatMeta | None:
            memory_format = expected(t)
            if memory_format is None:
                return original(t, *args, **kwargs)
            return MemoryFormatMeta(memory_format=memory_format)

        def undo() -> None:
            MemoryFormatMeta.from_tensor = descriptor

        MemoryFormatMeta.from_tensor = staticmethod(from_tensor)
        return undo

    return patch


def gradient_arrivals(note: Callable[[int, list[int]], None]) -> Patch:
    """Return a patch that notes in which order gradients come as a step is traced.

    After each call of ``torch.autograd.grad``, ``note`` is called with the count of its
    inputs, and the numbers of those to which autograd has come, in that order. Calls
    inside of another one are left alone.
    """

    def patch() -> Callable[[], None]:
        original, tracer = torch.autograd.grad, threading.get_ident()

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != tracer or isinstance(inputs, torch.Tensor):
                return original(outputs, inputs, *args, **kwargs)
            # Hooks run once more when autograd hands a gradient out.
            arrived: dict[int, None] = {}

            def noting(number: int) -> Callable[[torch.Tensor], None]:
                return lambda _gradient: arrived.setdefault(number)

            hooks = [each.register_hook(noting(n)) for n, each in enumerate(inputs)]
            torch.autograd.grad = original
            try:
                found = original(outputs, inputs, *args, **kwargs)
            finally:
                torch.autograd.grad = grad
                for hook in hooks:
                    hook.remove()
            note(len(inputs), list(arrived))
            return found

        def undo() -> None:
            torch.autograd.grad = original

        torch.autograd.grad = grad
        return undo

    return patch


def gradient_divisions(found: dict[int, Division | None]) -> Patch:
    """Return a patch that notes how the gradients of traced steps are divided.

    The graph has parts of them, and only the tracer knows what they are put together
    to.

    Parameters
    ----------
    found
        Takes, per position of an argument that gets a gradient, how that is divided;
        ``None`` for one that is whole, or none at all. Nothing where no argument or
        output is divided.
    """

    def patch() -> Callable[[], None]:
        original = graph_capture_wrappers.unwrap_tensor_subclasses

        @wraps(original)
        def unwrap(tensors: list[Any], descriptions: list[Any], **options: Any) -> Any:
            for tensor, each in zip(tensors, descriptions, strict=False):
                if isinstance(each, GradAOTOutput) and isinstance(
                    each.grad_of, PlainAOTInput
                ):
                    is_tensor = isinstance(tensor, torch.Tensor)
                    division = division_of(tensor) if is_tensor else None
                    found[each.grad_of.idx] = division
            return original(tensors, descriptions, **options)

        def undo() -> None:
            graph_capture_wrappers.unwrap_tensor_subclasses = original

        graph_capture_wrappers.unwrap_tensor_subclasses = unwrap
        return undo

    return patch


@contextmanager
def as_if_not_tracing() -> Generator[None]:
    """Run what a caller wrote, inside of a trace, as it runs in training.

    Optimizers take other ways where they are compiled, and operators on divided tensors
    look for the fake tensors of the trace. To be entered while :func:`alone`.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with no_tracing(None):
            yield
    finally:
        torch.compiler._is_compiling_flag = before


def python_kernels(kernels: Mapping[Any, Callable[..., Any] | None]) -> Patch:
    """Return a patch that gives operators other Python kernels, or none.

    The dispatcher asks an operator's Python kernels first, if it has any for the key.

    Parameters
    ----------
    kernels
        From operator overloads to kernels, or ``None``.
    """

    def patch() -> Callable[[], None]:
        before = {op: {k: op.py_kernels.get(k) for k in KEYS} for op in kernels}
        _install({op: dict.fromkeys(KEYS, kernel) for op, kernel in kernels.items()})
        return lambda: _install(before)

    return patch


def autocast_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Patch:
    """Return a patch that lets the CPU's autocast treat more operators.

    The dispatcher passes over operators that have no kernel for the key, so Python
    kernels beside it will not do. Those that have one keep it.

    Parameters
    ----------
    kernels
        From operator overloads to kernels, which run below autocast.
    """

    def patch() -> Callable[[], None]:
        library = torch.library.Library("aten", "IMPL")
        for op, kernel in kernels.items():
            name = op.name()
            if not has_kernel_for_key(name, _AUTOCAST):
                library.impl(name, _below_autocast(kernel), _AUTOCAST)

        def undo() -> None:
            library._destroy()
            for op in kernels:
                op._dispatch_cache.clear()

        return undo

    return patch


_AUTOCAST = "AutocastCPU"


def _below_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    keys = DispatchKeySet(DispatchKey.AutocastCPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude_dispatch_keys(keys):
            return kernel(*args, **kwargs)

    return run


def autocast_of_cuda() -> Callable[[], None]:
    """Patch ``torch.autocast("cuda")`` to be in force on the CPU's tensors."""
    original = torch.autocast.__init__

    @wraps(original)
    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    def undo() -> None:
        torch.autocast.__init__ = original

    torch.autocast.__init__ = init
    return undo


def _install(kernels: Mapping[Any, Mapping[Any, Callable[..., Any] | None]]) -> None:
    for op, by_key in kernels.items():
        for key, kernel in by_key.items():
            if kernel is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()


class ThreadKernels:
    """Python kernels of operators for those threads that ask for them, and only then.

    Threads that trace need not have the tracer's lock yet, and others must not wait.
    The kernels are there while any thread asks, and send the others on.

    Parameters
    ----------
    kernels
        From operator overloads to kernels; each is given the kernel that it replaces,
        and the arguments.
    """

    def __init__(self, kernels: Mapping[Any, Callable[..., Any]]) -> None:
        self._kernels = kernels
        self._lock = threading.Lock()
        self._count = 0
        self._before: dict[Any, dict[Any, Callable[..., Any] | None]] = {}
        self._here = threading.local()

    @contextmanager
    def seen(self) -> Generator[None]:
        """Let this thread trace with them."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before = {
                    op: {k: op.py_kernels.get(k) for k in KEYS} for op in self._kernels
                }
                _install({op: self._chosen(op) for op in self._kernels})
        depth = getattr(self._here, "depth", 0)
        self._here.depth = depth + 1
        try:
            yield
        finally:
            self._here.depth = depth
            with self._lock:
                self._count -= 1
                if not self._count:
                    _install(self._before)

    def _chosen(self, op: Any) -> dict[Any, Callable[..., Any]]:
        ours = self._kernels[op]

        def choosing(theirs: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if getattr(self._here, "depth", 0):
                    return ours(theirs, *args, **kwargs)
                return theirs(*args, **kwargs)

            return run

        return {
            key: choosing(theirs or composite_kernel(op))
            for key, theirs in self._before[op].items()
        }
