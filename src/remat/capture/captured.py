"""What functions of the caller's hold on to: targets, weights, tables, collections."""

import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from remat.torch_compat.attributes import forward_hooks
from remat.torch_compat.names import tree_leaves

_NOT_THE_USERS = ("torch", "builtins", "functools", "numpy")
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_COLLECTIONS = (list, dict, set, deque)
_MOST_ELEMENTS = 10_000
"""A list of a million samples takes seconds to look into, and hooks keep no such."""

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
def reached_put_back(
    model: nn.Module, is_foreign: Callable[[object], bool] | None = None
) -> Generator[None]:
    """Let hooks of a model run inside, and put back what they change of their own.

    Hooks of its modules are looked at, and functions that somebody has put in the place
    of a ``forward``: the attributes of objects that these reach, what is in lists,
    mappings, sets and queues, and variables of functions around them.

    Parameters
    ----------
    model
        The model.
    is_foreign
        If given, all stays unless there is something now for which this says so: then
        nothing that the hooks have made inside is of use.
    """
    search = _SearchOfHooks(model.modules())
    for module in model.modules():
        replaced = vars(module).get("forward")
        for function in (*forward_hooks(module), replaced):
            search.run(function)
    states = [_State(each) for each in search.states.values()]
    try:
        yield
    finally:
        others = [value for state in states for value in state.others()]
        if is_foreign is None or any(map(is_foreign, tree_leaves(others))):
            for state in states:
                state.put_back()


class _State:
    """What is in a collection, or in a variable of a function, at some time."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._entries = _entries(place)

    def others(self) -> list[Any]:
        """Return what is there now and was not then."""
        known = {id(value) for _, value in self._entries}
        return [value for _, value in _entries(self._place) if id(value) not in known]

    def put_back(self) -> None:
        """Let it be as it was, if it is not."""
        place = self._place
        now, then = (
            [(id(key), id(value)) for key, value in entries]
            for entries in (_entries(place), self._entries)
        )
        if now == then:
            return
        values = [value for _, value in self._entries]
        match place:
            case types.CellType():
                for value in values:
                    place.cell_contents = value
            case dict():
                # Never empty, as others may read attributes meanwhile.
                known = dict(self._entries)
                for key, _ in _entries(place):
                    if key not in known:
                        del place[key]
                for key, value in self._entries:
                    if key not in place or place[key] is not value:
                        place[key] = value
            case set():
                place.clear()
                place.update(values)
            case _:
                place.clear()
                place.extend(values)


def _entries(place: Any) -> list[tuple[Any, Any]]:
    """Return what is in a place, with keys, whatever a class of its own does."""
    if isinstance(place, types.CellType):
        return [(None, value) for value in _contents(place)]
    if isinstance(place, dict):
        return list(dict.items(cast("dict[Any, Any]", place)))
    kind: Any = next(kind for kind in _COLLECTIONS if isinstance(place, kind))
    return [(None, value) for value in kind.__iter__(place)]


class _Search:
    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}
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
            case Mapping() | list() | tuple() | set() | frozenset() | deque():
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


class _SearchOfHooks(_Search):
    """What hooks reach, and may change.

    Parameters
    ----------
    modules
        Whose state others look after.

    Attributes
    ----------
    states
        Collections, attributes of objects, and variables of functions.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.modules = frozenset(modules)
        self.states: dict[int, Any] = {}

    def visit(self, item: object, names: _Names) -> None:
        # What remat has installed looks after itself.
        if _is_ours(item):
            return
        if isinstance(item, nn.Module):
            self.visit_module(item, names)
            return
        if isinstance(item, _COLLECTIONS):
            self.states[id(item)] = item
            if len(cast("list[Any]", item)) > _MOST_ELEMENTS:
                return
        super().visit(item, names)

    def visit_module(self, module: nn.Module, names: _Names) -> None:
        if module in self.modules:
            return
        # Such as a loss with layers of its own, whose method is a hook.
        self.states[id(vars(module))] = vars(module)
        own = (vars(module)[name] for name in vars(module).keys() - _OF_EACH_MODULE)
        self.add((each for each in own if isinstance(each, _COLLECTIONS)), names)

    def visit_function(self, function: types.FunctionType) -> None:
        if not _is_foreign(function.__module__):
            cells = function.__closure__ or ()
            self.states |= {id(cell): cell for cell in cells}
        super().visit_function(function)

    def visit_object(self, item: object, names: _Names) -> None:
        # Attributes of some mappings are their entries.
        attributes = item.__dict__ if type(item).__dictoffset__ else None
        if type(attributes) is dict and not _is_foreign(type(item).__module__):
            self.states[id(attributes)] = attributes
        super().visit_object(item, names)


def _elements(items: Iterable[object]) -> Iterable[object]:
    return items.values() if isinstance(items, Mapping) else items


def _contents(cell: types.CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _is_ours(item: object) -> bool:
    function = item.__func__ if isinstance(item, types.MethodType) else item
    is_function = isinstance(function, types.FunctionType)
    module = function.__module__ if is_function else type(item).__module__
    return (module or "").partition(".")[0] == "remat"


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
