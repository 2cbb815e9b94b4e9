"""Nothing but ``remat.torch_compat`` knows what torch keeps private."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import remat
from remat.torch_compat.table import ATTRIBUTES, NAMES, TEXTS

ROOT = Path(remat.__file__).parent
DOOR = ROOT / "torch_compat"

PLACES = [
    place for p in NAMES.values() for place in [p.place] if isinstance(place, str)
]
CLASSES = {last for p in PLACES if (last := p.rpartition(":")[2])[:1].isupper()}
ATTRIBUTE_NAMES = {name for name in ATTRIBUTES if name.startswith("_")}
TEXT = re.compile(
    "|".join(rf"(?<!\w){re.escape(p.text)}(?!\w)" for p in TEXTS if p.text is not None)
    + r"|\b(?:func)?torch\._"
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


OF_NAMED_TUPLES = {"_asdict", "_fields"}
"""Documented, in spite of their names."""


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that code defines itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(
                value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()
            ):
                yield name
            case _:
                pass


def root_of(node: ast.expr) -> str:
    """Return the variable that an expression begins with, ``""`` if none."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value) | ast.Subscript(value=value):
            return root_of(value)
        case ast.Call(func=ast.Name(id="vars"), args=[value]):
            return root_of(value)
        case _:
            return ""


class Scan(ast.NodeVisitor):
    """Finds what only the door may have.

    Parameters
    ----------
    own
        Private names that the package defines.
    here
        Those that the file defines; its classes may call them as torch does.
    """

    def __init__(self, own: set[str], here: set[str]) -> None:
        self.own = (own - ATTRIBUTE_NAMES) | OF_NAMED_TUPLES
        self.here = here
        self.of_torch: set[str] = set()
        self.others: set[str] = set()
        self.found: list[tuple[int, str]] = []

    def say(self, node: ast.AST, what: str) -> None:
        self.found.append((getattr(node, "lineno", 0), what))

    def note_import(self, module: str, name: str) -> None:
        top = module.partition(".")[0]
        is_of_torch = (
            top in {"torch", "functorch"} or module == "remat.torch_compat.names"
        )
        (self.of_torch if is_of_torch else self.others).add(name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.check_import(node, alias.name, "")
            self.note_import(alias.name, alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.check_import(node, node.module or "", alias.name)
            self.note_import(node.module or "", alias.asname or alias.name)

    def check_import(self, node: ast.AST, module: str, name: str) -> None:
        parts = [*module.split("."), name]
        if parts[0] == "functorch" or (
            parts[0] == "torch" and any(map(is_private, parts))
        ):
            self.say(node, f"imports {name} of {module}")
        if module.startswith("unittest.mock") or name == "mock":
            self.say(node, "imports what patches")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        is_own = node.attr in self.own or (
            isinstance(node.value, ast.Name)
            and node.value.id in {"self", "cls"}
            and node.attr in self.here
        )
        is_unknown = is_private(node.attr) and not is_own
        if is_unknown and root_of(node) not in self.others:
            self.say(node, f"reads {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, str) and (
            value in CLASSES | ATTRIBUTE_NAMES or TEXT.search(value)
        ):
            self.say(node, f"knows the text {value!r}")

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # Not a docstring.
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(map(self.is_class_name, [node.left, *node.comparators])):
            self.say(node, f"compares the name of a class: {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        if self.is_class_name(node.subject):
            self.say(node, f"compares the name of a class: {ast.unparse(node.subject)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=value, attr="startswith" | "endswith" | "find"):
                if self.is_class_name(value):
                    self.say(node, f"compares the name of a class: {ast.unparse(node)}")
            case ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr" as how):
                self.check_by_name(node, how)
            case _:
                pass
        self.generic_visit(node)

    def check_by_name(self, node: ast.Call, how: str) -> None:
        name = node.args[1]
        text = str(name.value) if isinstance(name, ast.Constant) else ""
        if is_private(text) and text not in self.own:
            self.say(node, f"reads {text}")
        if how in {"setattr", "delattr"} and root_of(node.args[0]) in self.of_torch:
            self.say(node, f"changes {ast.unparse(node.args[0])}")

    @staticmethod
    def is_class_name(node: ast.expr) -> bool:
        match node:
            case ast.Attribute(
                value=ast.Call(func=ast.Name(id="type"))
                | ast.Attribute(attr="__class__"),
                attr="__name__" | "__qualname__",
            ):
                return True
            case _:
                return False

    def check_target(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Name) and root_of(target) in self.of_torch:
            self.say(target, f"changes {ast.unparse(target)}")

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.check_target(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.check_target(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self.check_target(target)
        self.generic_visit(node)


def trees(*, inside: bool) -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
        if (DOOR in path.parents) == inside
    }


def scanned(tree: ast.Module, own: set[str]) -> list[tuple[int, str]]:
    scan = Scan(own, set(own_names(tree)))
    scan.visit(tree)
    return scan.found


def test_there_is_one_door() -> None:
    outside = trees(inside=False)
    assert len(outside) > 100
    own = {name for tree in outside.values() for name in own_names(tree)}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path, tree in outside.items()
        for line, what in scanned(tree, own)
    ]
    assert not wrong, "belongs to remat.torch_compat:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", ["attributes", "patches", "metadata", "messages"])
def test_what_is_behind_it_would_be_found(name: str) -> None:
    found = scanned(trees(inside=True)[DOOR / f"{name}.py"], set())
    assert len(found) > 5


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "import functorch",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils._pytree import tree_leaves",
        "from torch.autograd import _profiler_enabled",
        "from torch import _dynamo as d",
        "from functorch._C import CompileCache",
        "from unittest import mock",
        "from unittest.mock import patch",
        "import torch\nx = torch._C.DispatchKey",
        "import torch\nx = torch.ops.aten._unsafe_view.default",
        "def f(model): return model._call_impl()",
        "def f(self): return self._forward_hooks",
        "def f(storage): return storage._cdata",
        "def f(hook): return getattr(hook, '_torchdynamo_disable', False)",
        "def f(model): setattr(model, '_compiled_call_impl', None)",
        "def f(x): return type(x).__name__ == 'PlainThing'",
        "def f(x): return 'PlainThing' != x.__class__.__name__",
        "def f(x): return type(x).__name__ in {'PlainThing'}",
        "def f(x): return type(x).__name__.startswith('Split')",
        "def f(x):\n    match type(x).__qualname__:\n        case 'A': return 1",
        "NAME = 'InputMutationAOTOutput'",
        "def f(node): return node.meta.get('partitioner_tag')",
        "def f(node): node.meta['saved_tensor_with_no_vc_check'] = True",
        "def f(text): return 'error: Developer debug context: x' in text",
        "NAME = 'torch._dynamo.config'",
        "from remat.torch_compat.names import FakeTensor as F\nF.device = None",
        "import torch\ntorch.nn.Linear.forward = None",
        "import torch\nsetattr(torch.nn.Linear, 'forward', None)",
        "import torch\nvars(torch)['compile'] = None",
        "import torch\ntorch.ops.aten.add.Tensor.py_kernels['x'] = None",
        "import torch\ndel torch.nn.Linear.forward",
    ],
)
def test_each_way_around_it_is_found(line: str) -> None:
    innocent = '"""Docstring on torch._dynamo."""\nimport os\n'
    assert scanned(ast.parse(innocent), set()) == []
    assert scanned(ast.parse(innocent + line), set()) != []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\nx = torch.nn.Linear(1, 1)",
        "import os\nos._exit(1)",
        "def f(self): return self._known",
        "def f(x): return f'a {type(x).__name__} is no tensor'",
        "def f(node): return node.meta['val']",
        "def f(model): model.forward = None",
        "if __name__ == '__main__': pass",
    ],
)
def test_what_is_allowed_is_not_found(line: str) -> None:
    assert scanned(ast.parse(line), {"_known"}) == []
