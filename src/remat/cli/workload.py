"""Load a training step from the user's own script or module."""

import contextlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

import torch
from torch import nn

from remat.core.errors import RematError, UsageError
from remat.profile.optimizers_in_backward import OptimizersInBackward
from remat.training.fitting import positional

DEFAULT_NAME = "remat_workload"
_PARTS = ("model", "args", "kwargs", "optimizer", "loss")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, an example batch, and what surrounds the step.

    Parameters
    ----------
    model
        Takes ``args`` and ``kwargs``.
    args, kwargs
        The batch.
    optimizer
        Or ``None``.
    loss
        From the model's outputs to a scalar, or ``None``.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any]
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[[Any], torch.Tensor] | None = None


def load_workload(factory: str, script_arguments: Sequence[str] = ()) -> Workload:
    """Return the training step that the user's factory builds.

    Parameters
    ----------
    factory
        ``module:callable`` or ``path/to/script.py:callable``; the callable is
        ``remat_workload`` if it is left out.
    script_arguments
        What the user's code finds in ``sys.argv`` after its own name.

    Raises
    ------
    UsageError
        If there is no such script, module or callable, if the user's code raises, or
        if what it returns is not a training step.
    """
    target, name = split_factory(factory)
    with _as_main_program(target, script_arguments):
        module = _load(target, factory)
        make = _find(module, name, target)
        _check_takes_nothing(make, factory, name)
        with _blamed_on_user(f"{factory}: {name}() raised"):
            made = make()
    return workload_of(made, f"{factory}: {name}()")


def split_factory(factory: str) -> tuple[str, str]:
    """Return the module or path, and the name of the callable.

    Examples
    --------
    >>> split_factory("train.py:small"), split_factory("project.train")
    (('train.py', 'small'), ('project.train', 'remat_workload'))
    """
    target, colon, name = factory.rpartition(":")
    if colon and name.isidentifier():
        return target, name
    return factory.removesuffix(":"), DEFAULT_NAME


def _is_path(target: str) -> bool:
    return target.endswith(".py") or os.sep in target or Path(target).is_file()


@contextlib.contextmanager
def _as_main_program(target: str, arguments: Sequence[str]) -> Generator[None]:
    """Let the user's code find its neighbours and its own command line."""
    folder = Path(target).resolve().parent if _is_path(target) else Path.cwd()
    argv_before = sys.argv
    sys.path.insert(0, str(folder))
    sys.argv = [target, *arguments]
    try:
        # What the user's code prints is no data of ours.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # The folder stays on the path: the model may import when it is called.
        sys.argv = argv_before


def _load(target: str, factory: str) -> ModuleType:
    if _is_path(target):
        return _load_script(Path(target))
    if not all(part.isidentifier() for part in target.split(".")):
        msg = f"{factory!r} names no module; write module:callable or script.py"
        raise UsageError(msg)
    try:
        with _blamed_on_user(f"{target}: importing it raised"):
            return importlib.import_module(target)
    except UsageError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not f"{target}.".startswith(f"{missing}."):
            raise
        msg = (
            f"there is no module {missing!r} here ({Path.cwd()}) or installed; give "
            "module:callable, or the path of a script that ends with .py"
        )
        raise UsageError(msg) from cause


def _load_script(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        msg = f"the script {str(path)!r} {what}"
        raise UsageError(msg)
    # A name of its own, as __main__ would be: a module of that name may exist.
    name = f"remat_script_{path.stem}"
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    if spec is None:
        msg = f"the script {str(path)!r} cannot be loaded"
        raise UsageError(msg)
    module = module_from_spec(spec)
    # Classes and pickles look up the module that they were made in.
    sys.modules[name] = module
    with _blamed_on_user(f"{path}: loading it raised"):
        loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str, target: str) -> Callable[[], object]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    others = sorted(
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
    )
    have = f"; it has {', '.join(others[:8])}" if others else ""
    msg = (
        f"{target} has no function {name}{have}. Define {DEFAULT_NAME}(), or name a "
        f"function as {target}:NAME, that returns (model, args)"
    )
    raise UsageError(msg)


def _check_takes_nothing(make: Callable[..., object], factory: str, name: str) -> None:
    """Refuse a factory that needs arguments.

    Raises
    ------
    UsageError
        If it does; the message names them, and where it is defined.
    """
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        # Some callables written in C have none; calling them shows what they need.
        return
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    if not needed:
        return
    place = ""
    with contextlib.suppress(TypeError, OSError):
        _, line = inspect.getsourcelines(make)
        place = f" ({inspect.getsourcefile(make)}:{line})"
    msg = (
        f"{factory}: {name}{place} is called without arguments, but needs "
        f"{', '.join(needed)}; give them defaults, or name a function without "
        "arguments that returns (model, args)"
    )
    raise UsageError(msg)


@contextlib.contextmanager
def _blamed_on_user(what: str) -> Generator[None]:
    """Turn whatever the user's code raises into one message with its line.

    Raises
    ------
    UsageError
        If the user's code raises anything but an interrupt or an error of this package.
    """
    try:
        yield
    except RematError:
        raise
    except SystemExit as stop:
        msg = (
            f"{what} SystemExit({stop.code}): code that trains or parses arguments "
            'belongs under if __name__ == "__main__"; words after -- become sys.argv'
        )
        raise UsageError(msg) from stop
    except Exception as error:
        text, place = str(error), _users_line(error)
        if isinstance(error, SyntaxError) and error.filename is not None:
            text, place = error.msg, f"{error.filename}:{error.lineno}"
        msg = f"{what} {type(error).__name__}: {text}{place and f' at {place}'}"
        raise UsageError(msg) from error


_OUR_FOLDER = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def _users_line(error: Exception) -> str:
    """Return the last line of the user's own code that an error came through.

    Without one, that of a library; empty if there is none but ours.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OUR_FOLDER, "<frozen "))
    ]
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_STANDARD_LIBRARY)
        and "site-packages" not in Path(frame.filename).parts
    ]
    last = (own or frames or [None])[-1]
    return "" if last is None else f"{last.filename}:{last.lineno}"


def workload_of(made: object, source: str) -> Workload:
    """Return what a factory returned as a workload.

    Parameters
    ----------
    made
        A tuple (model, args) or (model, args, kwargs), or a mapping or object with
        ``model`` and any of ``args``, ``kwargs``, ``optimizer`` (or
        ``make_optimizer``, from the model) and ``loss``.
    source
        Who returned it, for messages.

    Raises
    ------
    UsageError
        If it is none of these, or a part is of the wrong type.
    """
    parts = _parts_of(made, source)
    model, loss = parts.get("model"), parts.get("loss")
    kwargs: Any = parts.get("kwargs") or {}
    optimizer = parts.get("optimizer")
    if not isinstance(model, nn.Module):
        _refuse(source, "model", model, "a torch.nn.Module")
    if not isinstance(kwargs, Mapping):
        _refuse(source, "kwargs", kwargs, "a mapping of keyword arguments")
    if isinstance(optimizer, Mapping):
        try:
            optimizer = OptimizersInBackward(cast("Mapping[Any, Any]", optimizer))
        except (TypeError, ValueError) as error:
            msg = f"{source} returned an optimizer that cannot be counted: {error}"
            raise UsageError(msg) from error
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        _refuse(source, "optimizer", optimizer, "a torch.optim.Optimizer")
    if loss is not None and not callable(loss):
        _refuse(source, "loss", loss, "a function of the model's outputs")
    return Workload(
        model=model,
        args=positional(parts.get("args", ())),
        kwargs=dict(cast("Mapping[str, Any]", kwargs)),
        optimizer=optimizer,
        loss=cast("Callable[[Any], torch.Tensor] | None", loss),
    )


def _parts_of(made: object, source: str) -> dict[str, Any]:
    if isinstance(made, Mapping):
        parts = {str(k): v for k, v in cast("Mapping[object, Any]", made).items()}
        unknown = sorted(parts.keys() - set(_PARTS))
        if unknown:
            msg = (
                f"{source} returned a mapping with unknown keys {', '.join(unknown)}; "
                f"known are {', '.join(_PARTS)}"
            )
            raise UsageError(msg)
        return parts
    if isinstance(made, nn.Module):
        msg = f"{source} returned a model alone; return (model, args) with a batch"
        raise UsageError(msg)
    if hasattr(made, "model"):
        parts = {name: getattr(made, name) for name in _PARTS if hasattr(made, name)}
        if "optimizer" not in parts and hasattr(made, "make_optimizer"):
            parts["optimizer"] = cast("Any", made).make_optimizer(parts["model"])
        return parts
    if isinstance(made, tuple | list):
        values = cast("Sequence[Any]", made)
        if len(values) in {2, 3}:
            return dict(zip(_PARTS, values, strict=False))
    found = _describe(cast("object", made))
    msg = (
        f"{source} returned {found}; it must return (model, args), "
        f"(model, args, kwargs), or a mapping or object with {', '.join(_PARTS)}"
    )
    raise UsageError(msg)


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        sequence = cast("Sequence[object]", value)
        kind = "tuple" if isinstance(value, tuple) else "list"
        return f"a {kind} of {len(sequence)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse(source: str, part: str, value: object, needed: str) -> NoReturn:
    msg = f"{source} returned {_describe(value)} as {part}; it must be {needed}"
    raise UsageError(msg)
