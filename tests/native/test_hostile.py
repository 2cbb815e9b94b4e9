"""No argument of a native function kills the process, and the twins refuse the same."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.native import hostile

from remat.native import core

pytestmark = pytest.mark.skipif(core() is None, reason="there is no native core")

ROOT = Path(__file__).parents[2]


def functions() -> list[str]:
    module = core()
    assert isinstance(module, ModuleType)
    return [name for name in dir(module) if not name.startswith("_")]


def test_every_native_function_is_driven() -> None:
    assert sorted(hostile.bases()) == sorted(functions())


@pytest.mark.parametrize("name", sorted(hostile.bases()))
def test_valid_arguments_are_answered(name: str) -> None:
    _, arguments = hostile.bases()[name]
    getattr(core(), name)(*arguments)


@pytest.mark.parametrize("name", sorted(hostile.bases()))
def test_hostile_arguments_are_refused(name: str, tmp_path: Path) -> None:
    log = tmp_path / "cases"
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.hostile", name, str(log)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    last = log.read_text().splitlines()[-1:] if log.exists() else []
    assert done.returncode == 0, f"after {last}: {done.stderr[-4000:]}"
    count, refused = map(int, done.stdout.split())
    assert count >= 400
    assert refused >= count // 4
