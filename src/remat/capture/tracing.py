"""Trace a module's training step without running it, with errors a user can act on."""

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch.utils._pytree import tree_leaves

from remat.capture.returned import Note, loss_in, note_nothing
from remat.errors import CaptureError, RematError

_RAISED = re.compile(r"Developer debug context: raised exception (.+)")
_CONTEXT = re.compile(r"Developer debug context: (.+)")
_FAILED_CALL = re.compile(
    r"call_\w+ <[^>]*?(\w+)(?: at \w+)?>.*: got (\w+)\((.+)\)$", re.MULTILINE
)
_RECURRENT = "RNN, GRU, or LSTM"
_QUOTES = "\"'"
_NOT_THE_USERS = ("/site-packages/torch/", "remat/capture/tracing.py")
_USER_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>.+)'
)


def compiled_entry(
    model: nn.Module,
    compiler: Callable[..., Any],
    note: Note = note_nothing,
    *,
    traced: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return the model's call compiled by ``compiler``, with a code cache of its own.

    The tracer caches by code object, and all modules share that of
    ``nn.Module._call_impl``; a function made here has its own code object, so that
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
    """
    run = model._call_impl if traced is None else traced

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = run(*args, **kwargs)
        loss = loss_in(returned)  # noqa: F841 - the note reads it.
        comptime(note)
        return returned

    call.__code__ = call.__code__.replace(co_name=f"call_{id(model)}")
    return torch.compile(call, backend=compiler, fullgraph=True, dynamic=False)


def check_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Check that the example fits ``forward``, and is on one device with the model.

    Raises
    ------
    CaptureError
        If arguments are missing or too many, or tensors of the model or the example are
        on different devices.
    """
    _check_arguments(model, args, kwargs)
    homes: dict[torch.device, str] = {}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        homes.setdefault(parameter.device, f"{name} of the model")
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            homes.setdefault(
                leaf.device, f"an example input of shape {tuple(leaf.shape)}"
            )
    if len(homes) > 1:
        places = ", ".join(f"{name} is on {device}" for device, name in homes.items())
        msg = f"everything must be on one device: {places}; move it with .to(device)"
        raise CaptureError(msg)
    if torch.device("meta") in homes:
        msg = "the model is on the meta device; materialise it first, e.g. to_empty()"
        raise CaptureError(msg)


def _check_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if model._forward_pre_hooks or torch.nn.modules.module._global_forward_pre_hooks:
        return  # They may give forward other arguments.
    signature = inspect.signature(model.forward)
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


def raise_capture_error(error: Exception, failure: RematError | None) -> NoReturn:
    """Raise what a failed trace means to the user.

    Raises
    ------
    RematError
        ``failure``, if planning itself raised it.
    CaptureError
        Otherwise: what could not be traced, where in the user's code, what to do.
    """
    if failure is not None:
        # The frames of the tracer in between tell a user nothing.
        raise failure.with_traceback(None) from None
    inner = getattr(error, "inner_exception", None)
    if inner is not None:
        msg = f"the traced step could not be compiled: {type(inner).__name__}: {inner}"
        raise CaptureError(msg) from error
    text = str(error)
    what = _first_sentence(text)
    where = _user_source_line(text)
    raised = _RAISED.search(text)
    if raised is not None:
        msg = f"the example raises inside the model: {raised[1]}; at {where}"
    elif type(error).__name__ == "InternalTorchDynamoError":
        msg = f"the tracer itself failed: {what}; at {where}"
    elif _RECURRENT in text:
        msg = (
            "nn.RNN, nn.GRU and nn.LSTM cannot be traced: their loop over time is one "
            f"operator that the tracer refuses; at {where}. Write the loop with "
            "nn.RNNCell, nn.GRUCell or nn.LSTMCell, or fit the part of the model without "
            "it"
        )
    elif "making fake tensor call" in text:
        what = _what_failed(text)
        msg = f"the example raises inside the model: {what}; at {where}"
    else:
        msg = (
            f"the model cannot be traced as one graph: {what}; at {where}. Move that "
            "code out of forward (for a loss: compute it outside the model)"
        )
    raise CaptureError(msg) from error


@contextmanager
def quiet_tracer() -> Generator[None]:
    """Keep torch from printing the traceback of an error that is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            # Where forward made the op whose backward raised: with an interrupt, noise.
            warnings.filterwarnings("ignore", message="Error detected in ")
            yield
    finally:
        logger.disabled = before


def _first_sentence(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explanation = next((x for x in lines if x.startswith("Explanation:")), "")
    head = lines[0] if lines else "no explanation"
    return f"{head} ({explanation[13:]})" if explanation else head


def _what_failed(text: str) -> str:
    """Return the error of an operator that the tracer ran, and the operator's name."""
    call = _FAILED_CALL.search(text)
    if call is not None:
        return f"{call[2]} in {call[1]}: {call[3].strip(_QUOTES)}"
    context = _CONTEXT.search(text)
    return _first_sentence(text) if context is None else context[1]


def _user_source_line(text: str) -> str:
    """Return the innermost line of the user's code, else of the code it calls."""
    after = text.rsplit("from user code:", maxsplit=1)[-1]
    lines = after.splitlines()
    users = others = ""
    for position, line in enumerate(lines):
        match = _USER_FRAME.search(line)
        if match is None:
            continue
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        where = f"{match['file']}:{match['line']} in {match['where']}: {code}"
        if any(part in match["file"] for part in _NOT_THE_USERS):
            others = where
        else:
            users = where
    return users or others or "a line that is not known"
