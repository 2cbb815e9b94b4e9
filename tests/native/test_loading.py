"""Which implementation runs: the native core, another build of it, or the twins."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remat import native
from remat.core.errors import MissingDependencyError

SAY = "from remat import native; core = native.core(); print(core and core.__file__)"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_core_is_loaded_where_it_is_installed() -> None:
    core = native.core()
    assert core is not None
    assert core.__name__ == "remat.native._core"


def test_zero_switches_the_core_off() -> None:
    result = run(SAY, REMAT_NATIVE="0")
    assert (result.stdout, result.stderr) == ("None\n", "")


def test_a_path_is_loaded_instead(tmp_path: Path) -> None:
    core = native.core()
    assert core is not None
    other = tmp_path / Path(str(core.__file__)).name
    other.symlink_to(str(core.__file__))
    assert run(SAY, REMAT_NATIVE=str(other)).stdout == f"{other}\n"


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    result = run(SAY, REMAT_NATIVE=str(tmp_path / "absent.so"))
    assert result.returncode != 0
    assert "MissingDependencyError: REMAT_NATIVE names" in result.stderr


def test_a_missing_core_is_said_once_and_the_twin_runs() -> None:
    result = run(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name: None if name.endswith('._core') else find(name)\n"
        "from remat.native import native\n"
        "@native\n"
        "def doubled(number): return 2 * number\n"
        "print(doubled(2), doubled(3))",
        REMAT_NATIVE="",
    )
    assert result.stdout == "4 6\n"
    assert result.stderr.count("installed without its native core") == 1


def test_native_function_runs_instead_of_its_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Core:
        __file__ = "_core.so"

        @staticmethod
        def doubled(number: int) -> str:
            return f"native {number}"

    monkeypatch.setattr(native, "core", Core)

    @native.native
    def doubled(number: int) -> str:
        return f"twin {number}"

    @native.native
    def tripled(number: int) -> str:
        return f"twin {number}"

    with pytest.raises(MissingDependencyError, match="no 'tripled': it was built from"):
        tripled(1)
    assert doubled(1) == "native 1"
    assert inspect.unwrap(doubled)(1) == "twin 1"
