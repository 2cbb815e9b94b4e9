"""The table of what torch keeps private, and what is said where it lacks some."""

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from tests.test_repository import CONFIG

from remat.core.errors import RematError, UnsupportedTorchError
from remat.torch_compat import names, self_check
from remat.torch_compat.self_check import (
    check,
    check_installed,
    find,
    is_tested,
    lacking,
    name_of_torch,
    place_in,
)
from remat.torch_compat.table import (
    ATTRIBUTES,
    NAMES,
    TESTED,
    TEXTS,
    Private,
    everything,
)

DOOR = Path(self_check.__file__).parent


def source(*files: str) -> str:
    return "\n".join(
        (DOOR / f"{name}.py").read_text(encoding="utf-8") for name in files
    )


class TestTable:
    def test_the_installed_torch_has_everything(self) -> None:
        assert lacking(everything(), torch.__version__) == []

    @pytest.mark.parametrize("name", NAMES)
    def test_a_public_name_is_what_torch_has(self, name: str) -> None:
        assert getattr(names, name) is find(place_in(torch.__version__, NAMES[name]))

    def test_type_checkers_see_the_same(self) -> None:
        imported: dict[str, str] = {}
        seen: dict[str, str] = {}
        for node in ast.walk(ast.parse(source("names"))):
            match node:
                case ast.ImportFrom(module=str(module), names=aliases):
                    for alias in aliases:
                        imported[alias.name] = f"{module}.{alias.name}"
                        if alias.asname:
                            seen[alias.asname] = imported[alias.name]
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(
                        target=ast.Name(id=name), value=ast.Attribute() as value
                    )
                ):
                    seen[name] = imported.get(ast.unparse(value), ast.unparse(value))
                case _:
                    pass
        del seen["value"]  # Of the function that looks names up.
        version = torch.__version__
        places = {n: place_in(version, p).replace(":", ".") for n, p in NAMES.items()}
        assert seen == places

    def test_every_name_is_used(self) -> None:
        package = [p for p in DOOR.parent.rglob("*.py") if p.name != "table.py"]
        text = "\n".join(
            p.read_text(encoding="utf-8") for p in package if p.name != "names.py"
        )
        unused = [name for name in NAMES if not re.search(rf"\b{name}\b", text)]
        assert not unused

    def test_every_attribute_and_text_is_used(self) -> None:
        text = source("attributes", "patches", "metadata", "messages", "process_groups")
        known = [*ATTRIBUTES, *(p.text for p in TEXTS if p.text)]
        assert not [word for word in known if word not in text]

    def test_tested_versions_are_admitted(self) -> None:
        (torch_,) = (
            r
            for r in map(Requirement, CONFIG["project"]["dependencies"])
            if r.name == "torch"
        )
        assert all(version in torch_.specifier for version in TESTED)
        assert is_tested(torch.__version__)


class TestMissing:
    """A torch that lacks something: an error of ours says what, and what to do."""

    def test_every_missing_thing_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # What is imported while they are gone lacks them as well.
        check("2.99.0")
        monkeypatch.delattr("torch._prims_common.suggest_memory_format")
        monkeypatch.delattr("torch._guards.CompileContext")
        with pytest.raises(UnsupportedTorchError) as caught:
            check("2.99.0")
        message = str(caught.value)
        assert message.startswith("torch 2.99.0 lacks")
        assert "torch._prims_common.suggest_memory_format, needed for the" in message
        assert "torch._guards.CompileContext, needed for telling that" in message
        assert message.count("needed for") == 2
        assert f"Install torch {TESTED[0]} to {TESTED[-1]}" in message
        assert isinstance(caught.value, RematError)
        assert isinstance(caught.value, ImportError)

    @pytest.mark.parametrize(
        ("private", "found"),
        [
            (Private("torch._no_such_module:f", "x"), "torch._no_such_module.f"),
            (Private("torch:Tensor()._no_such", "x"), "torch.Tensor._no_such"),
            (Private("torch.fx.proxy", "x", text="qqq"), "'qqq' in torch.fx.proxy"),
        ],
    )
    def test_modules_attributes_and_texts_are_named(
        self, private: Private, found: str
    ) -> None:
        with pytest.raises(UnsupportedTorchError, match=re.escape(found)):
            check("2.99.0", [private, NAMES["FakeTensor"]])

    def test_a_torch_that_no_test_has_run_on_is_checked(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(torch, "__version__", "2.99.0")
        with caplog.at_level(logging.INFO, "remat"):
            check_installed()
        assert "torch 2.99.0 is none of the tested versions" in caplog.text
        monkeypatch.delattr("torch._guards.CompileContext")
        with pytest.raises(UnsupportedTorchError, match=r"2\.99\.0.*CompileContext"):
            check_installed()

    def test_a_tested_torch_is_not_checked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr("torch._guards.CompileContext")
        check_installed()

    def test_a_name_that_a_tested_torch_lacks_is_named_when_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr("torch._guards.CompileContext")
        with pytest.raises(UnsupportedTorchError, match="CompileContext"):
            name_of_torch("CompileContext")

    def test_a_name_that_nobody_knows_is_no_attribute(self) -> None:
        assert not hasattr(names, "no_such_name")

    def test_fit_says_it_before_anything_else(self) -> None:
        code = (
            "import sys, torch\n"
            "torch.__version__ = '2.99.0'\n"
            "del sys.modules['torch.optim.optimizer']._get_foreach_kernels_supported_devices\n"
            "import remat\n"
            "try: remat.fit\n"
            "except remat.RematError as error: print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("torch 2.99.0 lacks what remat uses")
        assert done.stdout.count("needed for") == 1


class TestPlaces:
    """A name may be elsewhere in other versions."""

    MOVED = Private({"2.11": "torch:nn", "2.14": "torch:fx"}, "x")

    @pytest.mark.parametrize(
        ("version", "place"),
        [
            ("2.10.0", "torch:nn"),
            ("2.11.0", "torch:nn"),
            ("2.13.1+cpu", "torch:nn"),
            ("2.14.0", "torch:fx"),
            ("2.15.0a0+git1", "torch:fx"),
        ],
    )
    def test_the_newest_that_is_not_too_new_counts(
        self, version: str, place: str
    ) -> None:
        assert place_in(version, self.MOVED) == place

    def test_it_is_found_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.14.0")
        assert name_of_torch("moved", {"moved": self.MOVED}) is torch.fx
