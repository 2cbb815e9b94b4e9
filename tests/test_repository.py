"""The repository agrees with itself: configuration, pins, tables and documents."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import remat
from remat import solvers
from remat.core import errors
from remat.solvers import SOLVERS

ROOT = Path(__file__).parents[1]
CONFIG: dict[str, Any] = tomllib.loads(
    (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)
TOOLS: dict[str, Any] = CONFIG["tool"]


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def requirements() -> list[Requirement]:
    """Return everything that the package and its extras ask for."""
    extras = CONFIG["project"]["optional-dependencies"].values()
    lines = [*CONFIG["project"]["dependencies"], *(line for e in extras for line in e)]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, Version]:
    """Return the tested version of every package, by lower-case name."""
    lines = [
        line
        for line in read("constraints.txt").splitlines()
        if line[:1] not in {"#", ""}
    ]
    pinned = dict(line.split("==") for line in lines)
    return {name.lower(): Version(version) for name, version in pinned.items()}


class TestConfiguration:
    """Paths and names in pyproject.toml are real; a typo there fails silently."""

    @pytest.mark.parametrize(
        "path",
        [
            *TOOLS["pyright"]["include"],
            *(env["root"] for env in TOOLS["pyright"]["executionEnvironments"]),
            *TOOLS["ruff"]["src"],
            *TOOLS["pytest"]["ini_options"]["testpaths"],
            *CONFIG["project"]["license-files"],
            CONFIG["project"]["readme"],
        ],
    )
    def test_path_exists(self, path: str) -> None:
        assert (ROOT / path).exists()

    @pytest.mark.parametrize("pattern", TOOLS["ruff"]["lint"]["per-file-ignores"])
    def test_ignore_pattern_matches_a_file(self, pattern: str) -> None:
        braces = re.search(r"\{(.*)\}", pattern)
        choices = braces[1].split(",") if braces else [""]
        for choice in choices:
            one = re.sub(r"\{.*\}", choice, pattern)
            matches = [p for p in ROOT.glob(one) if "__pycache__" not in p.parts]
            assert matches or one.startswith("docs/"), one

    def test_pyright_knows_the_lowest_python(self) -> None:
        assert CONFIG["project"]["requires-python"] == ">=3.11"
        assert TOOLS["pyright"]["pythonVersion"] == "3.11"
        assert TOOLS["ruff"]["target-version"] == "py311"

    def test_console_script_is_a_function(self) -> None:
        module, _, name = CONFIG["project"]["scripts"]["remat"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))

    def test_layers_are_modules(self) -> None:
        layers = TOOLS["importlinter"]["contracts"][0]["layers"]
        names = [
            re.sub(r"[()\s]", "", n) for line in layers for n in re.split("[|:]", line)
        ]
        assert len(names) == len(set(names))
        optional = {n for line in layers for n in re.findall(r"\((\w+)\)", line)}
        for name in set(names) - optional:
            assert find_spec(f"remat.{name}") is not None, name

    def test_forbidden_imports_name_real_modules(self) -> None:
        for contract in TOOLS["importlinter"]["contracts"]:
            for name in contract.get("source_modules", []):
                assert find_spec(name) is not None, name


class TestPins:
    """constraints.txt names one tested version of everything that is asked for."""

    @pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
    def test_pin_satisfies_the_requirement(self, requirement: Requirement) -> None:
        assert pins()[requirement.name.lower()] in requirement.specifier

    def test_torch_is_pinned_to_no_build(self) -> None:
        # With +cpu or +cu130 in the pin, an index that has another build has none.
        assert pins()["torch"].local is None

    def test_every_line_is_an_exact_pin(self) -> None:
        assert len(pins()) > 50


class TestVersions:
    """One version, wherever it is written."""

    VERSION: str = remat.__version__

    def test_version_is_read_from_the_package(self) -> None:
        assert "version" in CONFIG["project"]["dynamic"]
        provider = TOOLS["scikit-build"]["metadata"]["version"]
        assert provider["input"] == "src/remat/__init__.py"

    def test_citation_has_the_version(self) -> None:
        assert re.search(
            rf"^version: {re.escape(self.VERSION)}$", read("CITATION.cff"), re.MULTILINE
        )

    def test_changelog_has_the_version(self) -> None:
        assert re.search(
            rf"^## {re.escape(self.VERSION)}\b", read("CHANGELOG.md"), re.MULTILINE
        )


def solver_classes() -> Iterator[type]:
    """Yield every class under ``remat.solvers`` that fulfils the solver protocol."""
    for info in pkgutil.iter_modules(solvers.__path__):
        if info.ispkg or info.name == "base":
            continue
        module = importlib.import_module(f"remat.solvers.{info.name}")
        for value in vars(module).values():
            is_own = getattr(value, "__module__", None) == module.__name__
            if isinstance(value, type) and is_own and hasattr(value, "solve"):
                yield value


class TestSolverTable:
    """The table of solvers is complete, and what it lists keeps the contract."""

    def test_every_solver_is_in_the_table(self) -> None:
        assert set(solver_classes()) == set(SOLVERS.values())

    @pytest.mark.parametrize("name", SOLVERS)
    def test_name_is_for_a_command_line(self, name: str) -> None:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)

    @pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
    def test_solver_is_a_frozen_dataclass_with_defaults(self, solver: type) -> None:
        assert is_dataclass(solver)
        assert vars(solver)["__dataclass_params__"].frozen
        assert not {f.name for f in fields(solver)} & {"schedule_class", "is_exact"}
        solver()

    @pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
    def test_solver_says_what_it_claims(self, solver: type) -> None:
        assert isinstance(solver.schedule_class, str)
        assert solver.schedule_class
        assert isinstance(solver.is_exact, bool)


def sources() -> list[Path]:
    """Return the package's source files."""
    return sorted((ROOT / "src").rglob("*.py"))


def is_bytes(node: ast.expr) -> bool:
    """Return whether an expression is a variable or attribute holding bytes."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.endswith("_bytes")
        case _:
            return False


def imports_of(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    named += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in named}


class TestSource:
    """Rules that no linter knows."""

    @pytest.mark.parametrize(
        ("folder", "banned"),
        [
            ("src", {"tests", "studies", "examples"}),
            ("studies", {"tests"}),
            ("examples", {"tests"}),
        ],
    )
    def test_what_is_run_needs_no_tests(self, folder: str, banned: set[str]) -> None:
        # What a study compares with belongs to remat.testing.
        files = sorted((ROOT / folder).rglob("*.py"))
        assert files
        wrong = [p.name for p in files if imports_of(p) & banned]
        assert not wrong

    def test_there_are_sources(self) -> None:
        assert len(sources()) > 10

    @pytest.mark.parametrize(
        "path",
        [p for p in sources() if "solvers" in p.parts],
        ids=lambda path: path.name,
    )
    def test_solvers_round_bytes_with_units_only(self, path: Path) -> None:
        # A size rounded down, or a budget rounded up, breaks the promise.
        rounded = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.FloorDiv)
            and (is_bytes(node.left) or is_bytes(node.right))
        ]
        assert not rounded, f"use ceil_slots or floor_slots in lines {rounded}"


class TestDocuments:
    """Documents mention what exists, and what exists is documented."""

    def test_every_error_is_explained(self) -> None:
        explained = set(re.findall(r"^## (\w+)$", read("docs/errors.md"), re.MULTILINE))
        public = {
            name
            for name, value in vars(errors).items()
            if isinstance(value, type)
            and issubclass(value, errors.RematError | UserWarning)
        }
        assert explained == public - {"RematError"}

    def test_every_page_is_in_the_navigation(self) -> None:
        # The notebook becomes a page of its name when the site is built.
        found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
        pages = {
            p.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for p in found
        }
        assert pages == set(re.findall(r"[\w/-]+\.md", read("mkdocs.yml")))

    @pytest.mark.parametrize("command", ["make demo", "make test"])
    def test_commands_of_the_readme_exist(self, command: str) -> None:
        assert command in read("README.md")
        assert re.search(rf"^{command.split()[1]}:", read("Makefile"), re.MULTILINE)

    def test_readme_examples_are_valid_python(self) -> None:
        blocks = re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
        assert blocks
        for block in blocks:
            ast.parse(block)

    def test_local_links_lead_somewhere(self) -> None:
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
            text = page.read_text(encoding="utf-8")
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
                if "://" not in target:
                    assert (page.parent / target).exists(), f"{page.name}: {target}"


class TestScripts:
    """The scripts that machines start."""

    @pytest.mark.parametrize("file", ["slow.txt", "thorough.txt"])
    def test_every_test_that_is_left_out_exists(self, file: str) -> None:
        for name in (ROOT / "tests" / file).read_text(encoding="utf-8").splitlines():
            path, *_, function = name.partition("[")[0].split("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            # Pages and examples are tests of their own.
            assert f"def {function}(" in text or path.startswith("src/"), name

    def dry_run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--dry-run", "check", *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )

    @pytest.mark.parametrize(
        ("area", "paths"),
        [
            ("report", ["tests/report"]),
            ("core/test_unit", ["tests/core/test_units.py"]),
        ],
    )
    def test_check_leaves_out_what_is_slow(self, area: str, paths: list[str]) -> None:
        command = self.dry_run(f"AREA={area}").stdout.split("pytest ")[-1]
        assert '-m "not slow"' in command
        assert re.findall(r"\btests\S+", command) == paths
        everything = self.dry_run().stdout.split("pytest ")[-1]
        assert not re.findall(r"\btests\S+", everything)

    def test_check_of_an_area_that_does_not_exist_is_an_error(self) -> None:
        done = self.dry_run("AREA=nowhere")
        assert done.returncode == 2
        assert "no tests/nowhere*" in done.stderr

    def test_ci_is_executable(self) -> None:
        assert os.access(ROOT / ".ci/run", os.X_OK)

    def test_ci_parses_and_stops_on_errors(self) -> None:
        subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)
        assert "set -euo pipefail" in read(".ci/run")
