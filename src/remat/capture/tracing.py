"""Trace a module's training step without running it, with errors a user can act on."""

import inspect
import logging
import re
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    has_free_unbacked_symbols,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from remat.capture.first_call import prepare
from remat.capture.joint_program import user_source_line
from remat.capture.recurrent import recurrent_layers
from remat.capture.returned import Note, loss_in, note_nothing
from remat.capture.surroundings import tensors_in
from remat.core.errors import CaptureError, RematError
from remat.torch_compat import messages
from remat.torch_compat.attributes import (
    are_backward_hooks_global,
    contents_of,
    default_stance,
    has_backward_hooks,
    has_forward_pre_hooks,
    is_raised_by_tracer,
    plain_call,
    tracer_is_off,
)
from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    InternalTorchDynamoError,
    TorchDynamoException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    comptime,
    dynamo_config,
    is_in_dispatch_mode,
    tree_leaves,
)
from remat.torch_compat.patches import (
    Patch,
    alone,
    compiled_within,
    hooks_looked_for,
    patched,
    tracer_settings,
    unlogged_settings,
    untimed_guards,
)
from remat.torch_compat.sharding import (
    gathered_groups,
    is_gathered_around,
    is_in_pieces,
)

TRACE_ERRORS = (
    TorchDynamoException,
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What a trace may raise; all else that a planned call raises is of the call itself."""

_BY_VALUE = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""What is raised where a size or a branch depends on values."""

_WITH_CACHE = type(cache(abs))
"""The class of functions with a cache in front."""

_QUOTES = "\"'"
_OWN_FILE = "remat/capture/tracing.py"
_OWN_FOLDER = f"{Path(__file__).parents[1]}/"
_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(\w+)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>.+)')


def compiled_entry(  # noqa: PLR0913 - all that a trace hangs on
    model: nn.Module,
    compiler: Callable[..., Any],
    note: Note = note_nothing,
    *,
    traced: Callable[..., Any] | None = None,
    is_whole: bool = True,
    settings: Callable[[], Mapping[str, Any]] = dict,
    takes_layers: bool = True,
    prepared: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Return the model's call compiled by ``compiler``, with a code cache of its own.

    The tracer caches by code object, and all modules share that of
    ``nn.Module``'s call; a function made here has its own code object, so that
    plans of different models never meet.

    Parameters
    ----------
    model
        What is called.
    compiler
        As ``backend`` of ``torch.compile``.
    note
        Called in each trace, before the compiler.
    traced
        What is traced: the model's call with its hooks, or else its bare forward.
    is_whole
        Whether a model that the tracer splits into several graphs is refused.
    settings
        Returns, for each trace, settings of the tracer and their values.
    takes_layers
        Whether layers of an ``nn.LSTM`` may be operators, or all of them are left out.
    prepared
        Called when a library has prepared the model in the first call, before anything
        was traced, after which it may have hooks. Given by who looks before each call
        that no registered module has any; else the compiled call looks itself.
    """
    run = plain_call(model) if traced is None else traced
    # What is registered is looked through from the model on.
    is_its_own = getattr(run, "__self__", None) is model

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = run(*args, **kwargs)
        if is_whole:
            _loss = loss_in(returned)  # The note reads it.
            comptime(note)
        return returned

    call.__code__ = call.__code__.replace(co_name=f"call_{id(model)}")
    compiled = compiled_code(
        call,
        compiler,
        model=model,
        is_whole=is_whole,
        settings=settings,
        takes_layers=takes_layers,
        guards_hooks=prepared is None or not is_its_own,
    )
    return traced_entry(model, compiled, prepared)


def compiled_code(
    function: Callable[..., Any],
    compiler: Callable[..., Any],
    *,
    model: nn.Module,
    is_whole: bool = False,
    settings: Callable[[], Mapping[str, Any]] = dict,
    guards_hooks: bool = True,
    takes_layers: bool = True,
) -> Callable[..., Any]:
    """Return a function that a model's call runs, compiled.

    Parameters
    ----------
    function
        What is compiled, with a code object of its own.
    compiler, model, is_whole, settings, takes_layers
        As for :func:`compiled_entry`.
    guards_hooks
        Whether the code looks for hooks of registered modules itself.
    """
    found = weakref.ref(model)

    @contextmanager
    def around() -> Generator[None]:
        # Whoever calls it holds the model, and the tracer must not.
        model = found()
        recurrent: AbstractContextManager[None] = nullcontext()
        if model is not None:
            recurrent = recurrent_layers(model, takes_layers=takes_layers)
        ignored = _ignored_logs()
        changed = tracer_settings(ignore_logging_functions=ignored, **settings())
        patches: list[Patch] = [untimed_guards]
        if ignored:
            patches.append(unlogged_settings)
        is_unhooked = model is not None and not contents_of(model).are_hooked
        if is_unhooked and not guards_hooks:
            patches.append(hooks_looked_for)
        # Settings belong to the whole process in torch 2.11: one thread at a time.
        with patched(*patches), changed, recurrent:
            yield

    return compiled_within(function, compiler, around, fullgraph=is_whole)


def traced_entry(
    model: nn.Module,
    compiled: Callable[..., Any],
    prepared: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Return a call of a model that compiles some of its code, ready to be traced.

    Parameters
    ----------
    model
        What is called.
    compiled
        Its call, compiled or in parts.
    prepared
        As for :func:`compiled_entry`.

    Notes
    -----
    What a library prepares in a model's first call, under a lock that the tracer
    refuses, is prepared by a call on fake tensors, and the model is traced again.
    """
    is_new = True

    def entry(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_new
        was_new, is_new = is_new, False
        check_tracer()
        with default_stance():
            try:
                return compiled(*args, **kwargs)
            except TorchDynamoException as error:
                if messages.BACKWARD_HOOKS in str(error):
                    raise _refused_hooks(model) from error
                if not messages.AT_A_LOCK.search(str(error)):
                    raise
                with alone():
                    prepare(model, args, kwargs)
                if prepared is not None and was_new:
                    prepared()
            return compiled(*args, **kwargs)

    return entry


def check_tracer() -> None:
    """Refuse calls that cannot be traced.

    A trace that is begun all the same leaves a mark on all code it meets, and nobody's
    ``torch.compile`` would ever compile that code again.

    Raises
    ------
    CaptureError
        In a dispatch mode, and where the tracer is turned off.
    """
    if is_in_dispatch_mode() and _is_this_thread_in_dispatch_mode():
        msg = (
            "a TorchDispatchMode around the call (FlopCounterMode, "
            "allow_mutation_on_saved_tensors) keeps the tracer away; make the call "
            "outside of it, or call remat.release(model) to run it plainly"
        )
        raise CaptureError(msg)
    if tracer_is_off():
        msg = (
            "models are traced with torch.compile, which is turned off in this process; "
            "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
        )
        raise CaptureError(msg)


def _is_this_thread_in_dispatch_mode() -> bool:
    """Whether it is not another thread that traces: the mark is one for all."""
    with alone():
        return is_in_dispatch_mode()


def _ignored_logs() -> set[Callable[..., Any]]:
    """Return what the tracer leaves out: what the user said, and logs of once only.

    These are methods that libraries give to loggers to say a thing once, each with a
    cache in front of it, so that a second call does nothing. In a traced step the first
    does nothing either.
    """
    once = {
        method
        for method in vars(logging.Logger).values()
        if isinstance(method, _WITH_CACHE)
    }
    return once | dynamo_config.ignore_logging_functions


def is_without_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has shape and type, and nothing behind them."""
    return (tensor.is_meta and not is_lazy(tensor)) or isinstance(tensor, FakeTensor)


def check_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    may_be_sharded: bool = False,
) -> None:
    """Check that the example fits ``forward``, and is on one device with the model.

    Raises
    ------
    CaptureError
        If arguments are missing or too many, tensors of the model or the example are
        on different devices or have no memory, or the model is a wrapper that no trace
        can take.
    """
    check_is_no_wrapper(model, may_be_sharded=may_be_sharded)
    _check_arguments(model, args, kwargs)
    named = [
        (f"{name} of the model", tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    named += [
        (f"an example input of shape {tuple(tensor.shape)}", tensor)
        for tensor in tensors_in((args, dict(kwargs)))
        # Numbers in tensors on the CPU go anywhere.
        if tensor.dim() > 0 or is_without_memory(tensor)
    ]
    homes: dict[torch.device, str] = {}
    for name, tensor in named:
        if is_without_memory(tensor):
            msg = (
                f"{name} has no memory, so nothing runs: remat.plan plans the step as "
                'it is; give it memory, as by model.to_empty(device="cpu"), and its '
                "values before remat.fit"
            )
            raise CaptureError(msg)
        homes.setdefault(tensor.device, name)
    if len(homes) > 1:
        places = ", ".join(f"{name} is on {device}" for device, name in homes.items())
        msg = f"everything must be on one device: {places}; move it with .to(device)"
        raise CaptureError(msg)


def _check_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if has_forward_pre_hooks(model):
        return  # They may give forward other arguments.
    signature = inspect.signature(model.forward)
    batch = args[0] if len(args) == 1 and not kwargs else None
    # One name may be that of a value, as in forward(images) of {"images": ...}.
    if (
        isinstance(batch, Mapping)
        and len(batch) > 1
        and signature.parameters.keys() >= batch.keys()
    ):
        msg = (
            f"the example is one mapping, as in model(batch), and its keys are arguments "
            f"of {type(model).__name__}.forward ({', '.join(batch)}): for a step that "
            "calls model(**batch) give args=(), kwargs=batch"
        )
        raise CaptureError(msg)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = f" and {', '.join(kwargs)}" if kwargs else ""
        msg = (
            f"the example does not fit the arguments of forward: {error}; the example "
            f"has {len(args)} positional arguments{names}, and {type(model).__name__}"
            f".forward takes {signature}"
        )
        raise CaptureError(msg) from None


def check_is_no_wrapper(model: nn.Module, *, may_be_sharded: bool = False) -> None:
    """Refuse modules whose calls do more than a trace can take.

    Raises
    ------
    CaptureError
        If the model or a part of it is a distributed wrapper, is sharded, or is a
        script, or a parameter is sharded; names it and what to fit instead.
    """
    # Imported by whoever wrapped a module, and slow to import.
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = (
        ()
        if sharding is None
        else (
            sharding.FSDPModule,
            sharding.FullyShardedDataParallel,
        )
    )
    for name, module in model.named_modules():
        found = f"part {name!r} of the model" if name else "the model"
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            msg = (
                f"{found} is wrapped in {kind}, which cannot be traced; fit what is "
                "inside, remat.fit(model.module, ...), before or after it is wrapped; "
                "calls then say what the wrapper takes beside the plan"
            )
            raise CaptureError(msg)
        if may_be_sharded and sharding and isinstance(module, sharding.FSDPModule):
            continue
        if isinstance(module, sharded):
            msg = (
                f"{found} is sharded ({kind}), which cannot be traced as one graph; fit "
                "a model that is sharded by torch.distributed.fsdp.fully_shard, block "
                "by block: remat.fit(..., regions='blocks')"
            )
            raise CaptureError(msg)
        if isinstance(module, torch.jit.ScriptModule):
            msg = (
                f"{found} is a script ({kind}), which has no Python to trace; fit the "
                "module that it was made from"
            )
            raise CaptureError(msg)
    if may_be_sharded and gathered_groups(model):
        return
    for path, module in model.named_modules():
        for own_name, parameter in module.named_parameters(path, recurse=False):
            if is_in_pieces(parameter) and is_gathered_around(module):
                msg = (
                    f"parameter {own_name!r} of the model is sharded by a module around "
                    "the model, and only that one's call gathers it; fit the model "
                    "before it is sharded, and call the sharded module"
                )
                raise CaptureError(msg)


def _refused_hooks(model: nn.Module) -> CaptureError:
    hooked = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if has_backward_hooks(module)
    ]
    return CaptureError(
        "backward hooks of modules (register_full_backward_hook, "
        "register_full_backward_pre_hook) cannot be traced, and there are some on "
        f"{', '.join(hooked) or 'every module'}: remove them (handle.remove()), and "
        "hook tensors instead, for example output.register_hook(...) in a forward hook; "
        "hooks on parameters work too. With regions='breaks' such a module runs as it is, "
        "and the graphs around it are planned"
    )


def check_backward_hooks(model: nn.Module) -> None:
    """Refuse hooks for the backward pass of all modules, which no planned step runs.

    The tracer refuses them too, but not in a step that was traced before.

    Raises
    ------
    CaptureError
        If there are some.
    """
    if are_backward_hooks_global():
        raise _refused_hooks(model)


def check_sizes(module: fx.GraphModule) -> None:
    """Refuse a traced step in which a size or a number depends on values.

    Raises
    ------
    CaptureError
        With the operator and the user's source line.
    """
    for node in module.graph.nodes:
        for value in tree_leaves(example_of(node)):
            if not isinstance(value, torch.SymInt | torch.SymBool | torch.Tensor):
                continue
            # A number that is read may be known, from a size that has to be equal.
            is_read = node.target == "item" and not isinstance(value, torch.Tensor)
            if not (is_read or has_free_unbacked_symbols(value)):
                continue
            if not isinstance(value, torch.Tensor):
                found = "reads a whole number or a truth value from a tensor"
            else:
                found = "makes a tensor whose size depends on values"
            msg = (
                f"{node.name} {found}, and a plan is for one size of everything; at "
                f"{user_source_line(node) or _UNKNOWN_LINE}. {_FIXED_SIZES}; {_SPLIT}"
            )
            raise CaptureError(msg)


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def raise_capture_error(error: Exception, failure: RematError | None) -> NoReturn:
    """Raise what a failed trace means to the user.

    Raises
    ------
    RematError
        ``failure``, if planning itself raised it.
    CaptureError
        Otherwise: what could not be traced, where in the user's code, what to do.
    KeyboardInterrupt
        If the tracer failed as it was interrupted.
    """
    if failure is not None:
        # The frames of the tracer in between tell a user nothing.
        raise failure.with_traceback(None) from None
    interrupt = _interrupt_behind(error)
    if interrupt is not None:
        raise interrupt.with_traceback(None) from None
    inner = messages.wrapped_error(error)
    if inner is not None or not isinstance(error, TorchDynamoException):
        inner = inner or error
        line = _line_behind(inner)
        if isinstance(inner, _BY_VALUE):
            remedy = f"{_FIXED_SIZES}; {_SPLIT}"
        elif line:
            remedy = "Leave that operation out of the model, or compute it with others"
        else:
            remedy = "If that is not of code of yours, such as a hook, please report it"
        msg = (
            f"the traced step could not be compiled: {type(inner).__name__}: "
            f"{_first_sentence(str(inner))}; at {line or _UNKNOWN_LINE}. {remedy}"
        )
        raise CaptureError(msg) from error
    text = str(error)
    what = _first_sentence(text)
    where, library = _source_line(text)
    raised = messages.RAISED.search(text)
    if raised is not None:
        msg = (
            f"the example raises inside the model: {raised[1]}; at {where}. If it does not "
            f"without remat, {_DISABLE}"
        )
    elif messages.ASSERTION in what and messages.FALSE_ASSERTION.search(text):
        msg = f"the example raises inside the model: AssertionError; at {where}"
    elif isinstance(error, InternalTorchDynamoError):
        msg = f"the tracer itself failed: {what}; at {where}"
    elif messages.GRADIENT_INSIDE.search(text):
        msg = f"{GRADIENT_INSIDE}; at {where}"
    elif messages.RECURRENT.search(text):
        msg = (
            "nn.RNN and nn.GRU cannot be traced, nor an nn.LSTM that is not on the CPU in "
            "single precision, with sizes that do not vary and without autocast, "
            "proj_size and packed sequences: their loop over time is one operator that "
            f"the tracer takes apart; at {where}. Write the loop with nn.RNNCell, "
            "nn.GRUCell or nn.LSTMCell, or fit the part of the model without it; "
            f"{_SPLIT}"
        )
    elif messages.FAKE_CALL in text:
        what = _what_failed(text)
        msg = f"the example raises inside the model: {what}; at {where}"
    else:
        msg = (
            f"the model cannot be traced as one graph: {what}; at {where}. "
            f"{_remedy(text, library)}; {_SPLIT}"
        )
    raise CaptureError(msg) from error


def example_error(error: Exception) -> CaptureError:
    """Return what an error means that the model's own code raised for the example."""
    if is_raised_by_tracer(error):
        return CaptureError(
            f"the tracer fails at code that it cannot take: {type(error).__name__}: "
            f"{_first_sentence(str(error))}; {_DISABLE}"
        )
    line = _line_behind(error) or _line_that_ran(error) or _UNKNOWN_LINE
    return CaptureError(
        f"the example raises inside the model: {type(error).__name__}: "
        f"{_first_sentence(str(error))}; at {line}"
    )


GRADIENT_INSIDE = (
    "the model takes a gradient inside its forward (torch.autograd.grad, backward), and a "
    "planned graph has one backward pass, after forward. Compute that outside the model; "
    "or put it, with all that it differentiates, into a function under "
    '@torch.compiler.disable, which runs as it is, and give regions="breaks"'
)
"""What is said of double backward, in one graph and between several."""

_UNKNOWN_LINE = "a line that is not known"
_DISABLE = (
    "put that part into a function under @torch.compiler.disable, which runs as it is, "
    'and give regions="breaks"'
)
_SPLIT = 'or give regions="breaks", which plans the graphs on both sides of it'
_FIXED_SIZES = (
    "Write it with sizes and numbers that do not depend on values (torch.where, "
    "products with a mask, topk of a fixed count), or leave that part out of the model"
)


def _remedy(text: str, library: str) -> str:
    """Return what to do about code that cannot be traced.

    Parameters
    ----------
    text
        The tracer's message.
    library
        The package whose code it is, ``""`` for the user's own.
    """
    if messages.AT_A_LOCK.search(text):
        return (
            "If that is done only once, at the first call, run one forward pass first "
            "(with torch.no_grad(): model(...)); else take the lock outside forward"
        )
    if messages.LOGGED in text:
        return (
            f"{library or 'forward'} writes a log there: let it take a path without the "
            f"log, or add the logger's method to {messages.IGNORED_LOGS}, which leaves "
            "it out"
        )
    if messages.NEEDS_GRADIENT in text:
        return (
            "transformers does that, by a hook of the embedding, for "
            "gradient_checkpointing=True and model.enable_input_require_grads(): leave "
            "these out, as a plan takes the place of checkpoints"
        )
    if messages.BY_VALUE in text and not library:
        return _FIXED_SIZES
    if library:
        return (
            f"That is code of {library}: choose options of {library} that do without "
            "it, call that part outside the model, or fit the modules below it"
        )
    return "Move that code out of forward (for a loss: compute it outside the model)"


@contextmanager
def quiet_tracer() -> Generator[None]:
    """Keep torch from printing tracebacks of errors that are raised anyway, and advice.

    In one thread at a time: the log and the filters of warnings are everybody's.
    """
    loggers = [logging.getLogger(name) for name in messages.NOISY_LOGS]
    with alone(), warnings.catch_warnings():
        # Where forward made the op whose backward raised: with an interrupt, noise.
        warnings.filterwarnings("ignore", message=messages.FAILED_BACKWARD)
        before = [logger.disabled for logger in loggers]
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, was_disabled in zip(loggers, before, strict=True):
                logger.disabled = was_disabled


def _first_sentence(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith(messages.EXPLANATION)]
    head = lines[0] if lines else "no explanation"
    if not found:
        return head
    return f"{head} ({found[0].removeprefix(messages.EXPLANATION).lstrip()})"


def _what_failed(text: str) -> str:
    """Return the error of an operator that the tracer ran, and the operator's name."""
    call = messages.FAILED_CALL.search(text)
    if call is not None:
        name = call["function"] or call["operator"]
        return f"{call['error']} in {name}: {call['words'].strip(_QUOTES)}"
    context = messages.CONTEXT.search(text)
    return _first_sentence(text) if context is None else context[1]


def _source_line(text: str) -> tuple[str, str]:
    """Return where the tracer stopped, and the library whose code it is, if it is one.

    That is the innermost line outside torch, with the innermost line of the user's own
    code, where a library stopped that it calls.
    """
    lines = text.rsplit(messages.USER_CODE, maxsplit=1)[-1].splitlines()
    own = outside = inside = library = ""
    for position, line in enumerate(lines):
        match = _FRAME.search(line)
        if match is None:
            continue
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        where = f"{match['file']}:{match['line']} in {match['where']}: {code}"
        package = _LIBRARY.search(match["file"])
        if _OWN_FILE in match["file"]:
            inside = inside or where
        elif package is None:
            own = outside = where
            library = ""
        elif package[1] == "torch":
            inside = where
        else:
            outside, library = where, package[1]
    if not outside:
        is_torch = bool(inside) and _OWN_FILE not in inside
        return inside or _UNKNOWN_LINE, "torch" if is_torch else ""
    if own and library:
        return f"{outside}, called at {own}", library
    return outside, library


def _line_that_ran(error: BaseException) -> str:
    """Return the innermost line that ran of code that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_ours = frame.filename.startswith((_TORCH_FOLDER, _OWN_FOLDER))
        if frame.line and not is_ours:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def _line_behind(error: BaseException) -> str:
    """Return the user's line of the innermost node that an error is about, if any."""
    found, frame = "", error.__traceback__
    while frame is not None:
        for value in frame.tb_frame.f_locals.values():
            if isinstance(value, fx.Node):
                found = user_source_line(value) or found
        frame = frame.tb_next
    return found
