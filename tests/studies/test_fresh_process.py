"""Fresh processes: what they are given, and how their ends are told apart."""

import subprocess
import sys
from pathlib import Path

import pytest
from studies.fresh_process import STEADY_ALLOCATION, run_module

from studies import fresh_process


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that does what its argument says, in a folder of its own."""
    (tmp_path / "scripted.py").write_text("import sys\nexec(sys.argv[1])\n")
    monkeypatch.setattr(fresh_process, "_ROOT", tmp_path)
    return tmp_path


def run(code: str, *, limit_s: int = 60, keeps_output: bool = True):
    return run_module(
        "scripted",
        [code],
        limit_s=limit_s,
        variables=STEADY_ALLOCATION,
        keeps_output=keeps_output,
    )


@pytest.mark.usefixtures("script")
def test_what_ends_well_returns_its_output_and_saw_the_variables():
    ended = run("import os; print(os.environ['MALLOC_MMAP_MAX_'], end='')")
    assert ended.is_ok
    assert ended.output == "0"
    assert ended.message == ""


@pytest.mark.usefixtures("script")
def test_output_that_is_not_kept_goes_where_ours_goes(capfd: pytest.CaptureFixture):
    assert run("print('seen')", keeps_output=False).output == ""
    assert capfd.readouterr().out == "seen\n"


def test_what_fails_says_the_end_of_why_without_our_folders(script: Path):
    ended = run(f"sys.exit('{'x' * 3000} {script}/file.py is wrong')")
    assert not ended.is_ok
    assert ended.message.endswith("x file.py is wrong\n")
    assert len(ended.message) <= 2000
    line = ended.line("case 1")
    assert line["status"] == "failed"
    assert line["case"] == "case 1"
    assert line["message"] == ended.message


@pytest.mark.usefixtures("script")
def test_what_takes_too_long_is_stopped():
    ended = run("import time; time.sleep(1e6)", limit_s=1)
    assert ended.status == "timed out"
    assert ended.message == "more than 1 s"
    assert ended.elapsed_s >= 1


def test_the_module_loads_no_torch():
    # Processes that measure their own memory import it.
    code = "import sys, studies.fresh_process; sys.exit('torch' in sys.modules)"
    root = Path(fresh_process.__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)
    assert ended.returncode == 0
