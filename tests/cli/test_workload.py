"""Loading a training step from a script or module: what is taken, what is said."""

import sys
from pathlib import Path

import pytest
import torch

from remat.cli.workload import load_workload, split_factory
from remat.core.errors import UsageError

SCRIPT = str(Path(__file__).parent / "workloads.py")


@pytest.fixture(autouse=True)
def _same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("factory", "target", "name"),
    [
        ("train.py", "train.py", "remat_workload"),
        ("train.py:small", "train.py", "small"),
        ("project.train", "project.train", "remat_workload"),
        ("project.train:small", "project.train", "small"),
        ("C:\\models\\train.py", "C:\\models\\train.py", "remat_workload"),
        ("train.py:", "train.py", "remat_workload"),
        (":small", "", "small"),
    ],
)
def test_factory_is_split(factory: str, target: str, name: str) -> None:
    assert split_factory(factory) == (target, name)


@pytest.mark.parametrize("name", ["pair", "triple", "thing", "remat_workload"])
def test_each_form_is_taken(name: str) -> None:
    workload = load_workload(f"{SCRIPT}:{name}")
    assert isinstance(workload.model, torch.nn.Sequential)
    batch = [*workload.args, *workload.kwargs.values()]
    assert [tuple(part.shape) for part in batch] == [(64, 8)]
    has_optimizer = name in {"thing", "remat_workload"}
    assert isinstance(workload.optimizer, torch.optim.SGD) is has_optimizer
    assert callable(workload.loss) is (name == "remat_workload")


def test_a_module_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text(Path(SCRIPT).read_text())
    monkeypatch.chdir(tmp_path)
    workload = load_workload("neighbour_of_mine:pair")
    assert len(workload.args) == 1


def test_a_script_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "part_of_script.py").write_text("WIDTH = 5\n")
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "from part_of_script import WIDTH\n"
        "def remat_workload():\n"
        "    return torch.nn.Linear(WIDTH, 1), torch.randn(2, WIDTH)\n"
    )
    workload = load_workload(str(tmp_path / "script.py"))
    assert workload.args[0].shape == (2, 5)


def test_words_after_the_dashes_are_the_scripts_own() -> None:
    before = sys.argv
    assert load_workload(f"{SCRIPT}:with_arguments", ["3"]).args[0].shape == (3, 8)
    assert sys.argv is before


def test_what_the_script_prints_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    load_workload(SCRIPT)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "this is no data\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", r"number\(\) returned a int; it must return \(model, args\)"),
        ("model_alone", r"returned a model alone; return \(model, args\)"),
        ("misspelt", r"unknown keys arguments; known are model, args, kwargs"),
        ("wrong_optimizer", r"returned a str as optimizer; it must be a torch\.optim"),
        ("no_model", r"returned a str as model; it must be a torch\.nn\.Module"),
        ("raising", r"raised ZeroDivisionError: .* at .*workloads\.py:\d+"),
        ("leaving", r"raised SystemExit\(usage: me\): .*__main__"),
        ("absent", r"has no function absent; it has frozen, .* as .*:NAME"),
        ("not_callable", r"has no function not_callable"),
    ],
)
def test_what_is_wrong_is_said(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_workload(f"{SCRIPT}:{name}")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("absent.py", r"the script 'absent\.py' does not exist"),
        ("absent_module:f", r"there is no module 'absent_module' here"),
        ("json.absent:f", r"there is no module 'json\.absent'"),
        (":f", "names no module"),
        (".", "'.' names no module"),
        ("./", "is a folder"),
        ("my-module:f", "names no module"),
    ],
)
def test_what_is_missing_is_said(factory: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_workload(factory)


def test_an_import_that_fails_inside_is_the_scripts_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import absent_dependency\n")
    with pytest.raises(
        UsageError, match=r"No module named 'absent_dependency' at .*:1"
    ):
        load_workload(str(script))


@pytest.mark.parametrize("is_module", [False, True])
def test_a_syntax_error_cites_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_module: bool
) -> None:
    (tmp_path / "misspelt_script.py").write_text("x = 1\n\ndef remat_workload(:\n")
    monkeypatch.chdir(tmp_path)
    name = "misspelt_script" if is_module else "misspelt_script.py"
    with pytest.raises(UsageError) as refused:
        load_workload(name)
    assert str(refused.value).endswith("misspelt_script.py:3")
    assert "SyntaxError: invalid syntax at" in str(refused.value)
    assert "frozen" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("needs_arguments", "needs batch, depth;"),
        ("NeedsArguments", "needs width;"),
        ("needs_arguments_bound", "needs batch;"),
    ],
)
def test_a_factory_that_needs_arguments_is_the_users(name: str, needed: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_workload(f"{SCRIPT}:{name}")
    message = str(refused.value)
    assert needed in message
    assert "without arguments" in message
    assert name in message
    assert "workload.py" not in message
    if name != "needs_arguments_bound":
        lines = Path(SCRIPT).read_text().splitlines()
        (line,) = [n for n, text in enumerate(lines, 1) if f" {name}(" in text]
        assert f"({SCRIPT}:{line})" in message


def test_an_error_inside_a_library_cites_the_line_that_called_it() -> None:
    with pytest.raises(UsageError) as refused:
        load_workload(f"{SCRIPT}:raising_in_torch")
    lines = Path(SCRIPT).read_text().splitlines()
    (line,) = [n for n, text in enumerate(lines, 1) if "nn.Linear(3, 4)(" in text]
    assert str(refused.value).endswith(f" at {SCRIPT}:{line}")


def test_an_interrupt_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_workload(f"{SCRIPT}:interrupted")
