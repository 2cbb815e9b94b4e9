"""What functions of the caller's hold on to: targets, weights, tables, collections."""

import functools
import inspect
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from remat.torch_compat.attributes import forward_hooks
from remat.torch_compat.names import tree_leaves

_NOT_THE_USERS = ("torch", "builtins", "functools", "numpy")
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_COLLECTIONS = (list, dict, set, deque)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_Names = frozenset[str]


def plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that modules hold in attributes, also inside containers.

    Some modules keep what they computed last, such as a normalised weight, or constants
    in a list. Parameters and buffers are among them.
    """
    found: list[torch.Tensor] = []
    # Of each type, whether it is one of tensors, and of containers: there are few types
    # and very many attributes.
    kinds: dict[type, tuple[bool, bool]] = {}
    # Containers may hold themselves.
    seen = set[int]()
    for module in model.modules():
        waiting = list(vars(module).values())
        while waiting:
            item = waiting.pop()
            kind = type(item)
            if kind not in kinds:
                is_container = issubclass(kind, _CONTAINERS)
                kinds[kind] = issubclass(kind, torch.Tensor), is_container
            is_tensor, is_container = kinds[kind]
            if is_tensor:
                found.append(item)
            elif is_container and id(item) not in seen:
                seen.add(id(item))
                waiting.extend(_elements(item))
    return found


def captured_tensors(function: object) -> list[torch.Tensor]:
    """Return the tensors that a function reaches without being given them.

    Followed are what it closes over, its defaults, what is bound to it, the globals
    that its code names, and of objects the attributes that the code names; so are the
    user's functions and methods that it calls. Modules count with all that they hold.

    Parameters
    ----------
    function
        Any callable, or ``None``, which reaches nothing.

    Notes
    -----
    What is computed by name (``getattr``) or hidden in compiled code is not found.
    """
    search = _Search()
    search.run(function)
    return list(search.found.values())


@contextmanager
def collected_put_back(model: nn.Module) -> Generator[None]:
    """Let hooks of a model collect tensors inside, and take these out again.

    Looked at are the lists, mappings, sets and queues that hooks of its modules reach,
    and functions that somebody has put in the place of a ``forward``. One that has
    other tensors at the end is as it was at the beginning then.
    """
    search = _Search()
    for module in model.modules():
        replaced = vars(module).get("forward")
        for function in (*forward_hooks(module), replaced):
            # What remat has installed looks after itself.
            if not type(function).__module__.startswith("remat."):
                search.run(function)
    before = [(each, _entries(each)) for each in search.collections.values()]
    try:
        yield
    finally:
        for each, entries in before:
            known = {id(value) for _, value in entries}
            others = [value for _, value in _entries(each) if id(value) not in known]
            if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(others)):
                each.clear()
                for key, value in entries:
                    match each:
                        case dict():
                            each[key] = value
                        case set():
                            each.add(value)
                        case _:
                            each.append(value)


def _entries(collection: Any) -> list[tuple[Any, Any]]:
    """Return what is in a collection, with keys, whatever a class of its own does."""
    if isinstance(collection, dict):
        return list(dict.items(cast("dict[Any, Any]", collection)))
    kind = next(kind for kind in _COLLECTIONS if isinstance(collection, kind))
    return [(None, value) for value in kind.__iter__(collection)]


class _Search:
    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self.collections: dict[int, Any] = {}
        self.seen: set[tuple[int, _Names]] = set()
        self.waiting: list[tuple[object, _Names]] = []
        # Bound methods are made on access; kept, so that no identity is used twice.
        self.kept: list[object] = []

    def run(self, start: object) -> None:
        self.add([start], frozenset())
        while self.waiting:
            item, names = self.waiting.pop()
            if (id(item), names) in self.seen:
                continue
            self.seen.add((id(item), names))
            self.kept.append(item)
            self.visit(item, names)

    def add(self, items: Iterable[object], names: _Names) -> None:
        """Visit ``items`` later, from code that uses ``names``."""
        self.waiting.extend((item, names) for item in items)

    def visit(self, item: object, names: _Names) -> None:
        match item:
            case torch.Tensor():
                self.found[id(item)] = item
            case None | bool() | int() | float() | complex() | str() | bytes() | type():
                return
            case nn.Module():
                self.add(plain_tensors(item), names)
                # Such as a loss with layers of its own, whose method is a hook.
                own = (vars(item)[name] for name in vars(item).keys() - _OF_EACH_MODULE)
                self.add(
                    (each for each in own if isinstance(each, _COLLECTIONS)), names
                )
            case Mapping() | list() | tuple() | set() | frozenset() | deque():
                if isinstance(item, _COLLECTIONS):
                    self.collections[id(item)] = item
                self.add(_elements(cast("Iterable[object]", item)), names)
            case functools.partial():
                self.add([item.func, item.args, item.keywords], names)
            case types.FunctionType():
                self.visit_function(item)
            case types.MethodType():
                self.add([item.__func__], names)
                self.add([item.__self__], _names_in(item.__func__))
            case types.ModuleType():
                self.visit_namespace(item, names)
            case _:
                self.visit_object(item, names)

    def visit_function(self, function: types.FunctionType) -> None:
        if _is_foreign(function.__module__):
            return
        names = _names_in(function)
        for cell in function.__closure__ or ():
            # A cell of a name that was never assigned is empty.
            self.add(_contents(cell), names)
        self.add(function.__defaults__ or (), names)
        self.add((function.__kwdefaults__ or {}).values(), names)
        space = function.__globals__
        self.add([space[name] for name in names if name in space], names)
        # A decorator keeps what it wraps.
        self.add(vars(function).values(), names)

    def visit_namespace(self, module: types.ModuleType, names: _Names) -> None:
        if not _is_foreign(module.__name__):
            space = vars(module)
            self.add([space[name] for name in names if name in space], names)

    def visit_object(self, item: object, names: _Names) -> None:
        if _is_foreign(type(item).__module__):
            return
        for name in {*names, "__call__"}:
            value = inspect.getattr_static(item, name, None)
            match value:
                case property():
                    self.add_method(item, value.fget)
                case types.FunctionType():
                    self.add_method(item, value)
                case types.MemberDescriptorType():  # A slot.
                    self.add([getattr(item, name, None)], names)
                case _:
                    self.add([value], names)

    def add_method(self, owner: object, function: object) -> None:
        if isinstance(function, types.FunctionType):
            self.add([function, owner], _names_in(function))


def _elements(items: Iterable[object]) -> Iterable[object]:
    return items.values() if isinstance(items, Mapping) else items


def _contents(cell: types.CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _NOT_THE_USERS


def _names_in(function: Any) -> _Names:
    """Return the global and attribute names in a function's code, nested code too."""
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else frozenset(_code_names(code))


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)
