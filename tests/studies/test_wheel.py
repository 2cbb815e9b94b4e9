"""The trial of a wheel: what it may find, and what it must not."""

import tarfile
from pathlib import Path

import pytest

from studies import wheel


def test_the_environment_leads_to_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setenv("PYTHONPATH", "src")
    trial = wheel.Trial(tmp_path)
    variables = trial.variables()
    assert variables["PATH"] == str(trial.programs)
    assert not {"CXX", "PYTHONPATH"} & set(variables)


def test_a_compiler_beside_the_programs_is_refused(tmp_path: Path) -> None:
    trial = wheel.Trial(tmp_path)
    trial.programs.mkdir(parents=True)
    compiler = trial.programs / "c++"
    compiler.touch(mode=0o755)
    with pytest.raises(RuntimeError, match=r"holds \['c\+\+'\]"):
        trial.check()


def test_tests_are_unpacked_without_the_package(tmp_path: Path) -> None:
    sdist = tmp_path / "remat-1.tar.gz"
    names = ["remat-1/src/remat/a.py", "remat-1/tests/a.py", "remat-1/pyproject.toml"]
    source = tmp_path / "empty"
    source.touch()
    with tarfile.open(sdist, "w:gz") as archive:
        for name in names:
            archive.add(source, name)
    wheel.unpack_tests(sdist, tmp_path)
    assert [(tmp_path / name).exists() for name in names] == [False, True, True]


def test_one_wheel_is_tried(tmp_path: Path) -> None:
    (tmp_path / "a.whl").touch()
    assert wheel.only(tmp_path, "*.whl") == (tmp_path / "a.whl").resolve()
    (tmp_path / "b.whl").touch()
    with pytest.raises(FileNotFoundError, match=r"'a\.whl', 'b\.whl'"):
        wheel.only(tmp_path, "*.whl")
