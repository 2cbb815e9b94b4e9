"""The documentation tells the truth: its code runs, its tables are the code's."""

import argparse
import dataclasses
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import remat
from remat import algorithms
from remat.cli import main
from remat.cli.base import ExitCode
from remat.cli.commands import COMMANDS
from remat.solvers.registry import AUTO, SOLVERS
from studies import headline, notebook

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
PAGES_WITH_CODE = [
    "README.md",
    "docs/index.md",
    "docs/usage.md",
    "docs/frameworks.md",
    "docs/extending.md",
    "docs/lower-sets.md",
    "docs/reference.md",
    "docs/chains/revolve.md",
    "docs/chains/levels.md",
    "docs/chains/joins.md",
    "docs/chains/rotor.md",
    "docs/chains/unequal-joins.md",
    "docs/chains/pofo.md",
    "docs/xengine.md",
    "docs/devices.md",
    "docs/hardware.md",
    "docs/design/allocator.md",
]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page that are marked with a language."""
    return [code for marked, code in _BLOCK.findall(text) if marked == language]


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return _BLOCK.sub("", text)


def sections(text: str) -> dict[str, str]:
    """Return the text under each second-level heading of a page."""
    _, *found = re.split(
        r"^## (.+)$", _BLOCK.sub(_hide_comments, text), flags=re.MULTILINE
    )
    return dict(zip(found[::2], found[1::2], strict=True))


def _hide_comments(block: re.Match[str]) -> str:
    return block[0].replace("\n#", "\n #")


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]
    rules = {i for i, row in enumerate(cells) if set("".join(row)) <= set("-| ")}
    return [row for i, row in enumerate(cells) if not {i, i + 1} & rules]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as the site builder makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", h).strip().lower().replace(" ", "-") for h in heads}


class TestCode:
    """What is marked as Python runs, page by page, in the order of the page."""

    @pytest.fixture(autouse=True)
    def _away_from_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
        torch.manual_seed(0)
        yield
        torch.compiler.reset()

    # What Lightning calls that torch is about to remove, and its advice for loaders.
    @pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
    @pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many")
    @pytest.mark.parametrize("page", PAGES_WITH_CODE)
    def test_page_runs(self, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
        found = blocks(read(page), "python")
        assert found
        # The tracer looks for the module of a function that it inlines.
        module = ModuleType("documentation")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for number, code in enumerate(found):
            exec(compile(code, f"{page}, block {number}", "exec"), vars(module))

    def test_factory_of_the_command_line_works(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        *_, factory = blocks(read("docs/command-line.md"), "python")
        Path("train.py").write_text(factory, encoding="utf-8")
        words = ["plan", "train.py", "--budget", "60%", "--estimated", "--quiet"]
        assert main([*words, "--output", "plan.json"]) == ExitCode.OK
        assert main(["show", "plan.json", "--quiet"]) == ExitCode.OK
        assert capsys.readouterr().out.count("plan for Sequential") == 2

    def test_pages_with_code_are_run(self) -> None:
        with_code = {
            page.relative_to(ROOT).as_posix()
            for page in PAGES
            if blocks(page.read_text(encoding="utf-8"), "python")
        }
        assert with_code == {*PAGES_WITH_CODE, "docs/command-line.md"}

    def test_commands_shown_exist(self) -> None:
        texts = [page.read_text(encoding="utf-8") for page in PAGES]
        consoles = "".join(code for text in texts for code in blocks(text, "console"))
        shown = [
            *re.findall(r"^remat ([a-z-]+)", consoles, re.MULTILINE),
            *re.findall(r"`remat ([a-z-]+) [^`]*`", "".join(map(prose, texts))),
        ]
        assert len(shown) >= 9
        assert set(shown) <= {command.name for command in COMMANDS}


class TestNotebook:
    """The notebook of first steps runs, and holds what it showed."""

    @pytest.fixture
    def cells(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[list[dict[str, Any]]]:
        monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
        yield notebook.load(notebook.NOTEBOOK)["cells"]
        torch.compiler.reset()

    def test_it_runs_and_keeps_its_promises(self, cells: list[dict[str, Any]]) -> None:
        kept = [self.shown(cell) for cell in cells]
        notebook.run({"cells": cells})
        found = [self.shown(cell) for cell in cells]
        assert [[kind for kind, _ in cell] for cell in kept] == [
            [kind for kind, _ in cell] for cell in found
        ]
        text = "".join(part for cell in found for _, part in cell)
        for promise in ("within the budget: True", "same bits: True"):
            assert promise in text
        assert "False" not in text
        assert found[-2][-1] == ("text/plain", "True")

    def shown(self, cell: dict[str, Any]) -> list[tuple[str, str]]:
        """Return the kind and the text of all that a cell shows."""
        return [
            part
            for output in cell.get("outputs", [])
            for part in output.get("data", {"stdout": output.get("text")}).items()
        ]

    def test_its_page_has_its_text_its_code_and_what_it_showed(self) -> None:
        loaded = notebook.load(notebook.NOTEBOOK)
        page = notebook.markdown(loaded)
        assert page.startswith("# First steps\n")
        for cell in loaded["cells"]:
            assert cell["source"] in page
            for kind, text in self.shown(cell):
                assert kind == "text/plain" or text.rstrip() in page
        assert "<strong>plan for Sequential</strong>" in page

    def test_references_of_docstrings_become_links(self) -> None:
        html = notebook.on_page_content("as :func:<code>~remat.core.units.f</code>.")
        name = "remat.core.units.f"
        assert html == (
            f'as <autoref optional identifier="{name}"><code>f</code></autoref>.'
        )


class TestGenerated:
    """The pages made from docstrings name what exists, and all that is public."""

    NAMES = tuple(
        name
        for page in sorted((DOCS / "api").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
    )

    @pytest.mark.parametrize("name", NAMES)
    def test_name_exists_and_is_documented(self, name: str) -> None:
        assert pkgutil.resolve_name(name).__doc__

    def test_everything_public_is_there(self) -> None:
        there = [pkgutil.resolve_name(name) for name in self.NAMES]
        modules = {one.__name__ for one in there if inspect.ismodule(one)}
        for package, names in ((remat, public_names()), (algorithms, dir(algorithms))):
            for name in names:
                value = getattr(package, name)
                if name.startswith("_") or not callable(value):
                    continue
                assert value in there or value.__module__ in modules, name


class TestLinks:
    """Links inside the documentation lead to a page and a heading that exist."""

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_links_lead_somewhere(self, page: Path) -> None:
        for link in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name) if name else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors(target.read_text(encoding="utf-8")), link

    @pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: p.name)
    def test_pages_of_the_site_link_inside_it(self, page: Path) -> None:
        # What is outside docs/ is not on the site.
        for link in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
            if "://" not in link and not link.startswith("#"):
                target = (page.parent / link.partition("#")[0]).resolve()
                assert target.is_relative_to(DOCS), link

    def test_readme_leads_to_the_page_that_leads_to_every_page(self) -> None:
        assert "docs/index.md#all-pages" in _LINK.findall(read("README.md"))
        linked = set(_LINK.findall(sections(read("docs/index.md"))["All pages"]))
        pages = {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")} - {DOCS / "index.md"}
        assert linked == {page.relative_to(DOCS).as_posix() for page in pages}

    def test_every_picture_is_shown(self) -> None:
        pictures = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("images/*")}
        texts = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")]
        shown = re.findall(r"!\[[^\]]*\]\((?:\.\./)?(images/\S+)\)", "\n".join(texts))
        assert pictures == set(shown)

    def test_no_two_pages_have_the_same_title(self) -> None:
        pages = DOCS.rglob("*.md")
        titles = [page.read_text(encoding="utf-8").splitlines()[0] for page in pages]
        assert len(set(titles)) == len(titles)


class TestSolvers:
    """The tables of solvers are the table of the code."""

    TABLE = rows(
        sections(read("docs/solvers.md").replace("# Solvers", "## Solvers"))["Solvers"]
    )

    def test_every_solver_has_a_row(self) -> None:
        assert [row[0] for row in self.TABLE] == [f"`{name}`" for name in SOLVERS]

    @pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].strip("`"))
    def test_row_says_what_the_solver_claims(self, row: list[str]) -> None:
        solver = SOLVERS[row[0].strip("`")]
        assert row[1] == f"`{solver.__name__}`"
        assert row[2] == solver.schedule_class
        assert row[3] == ("yes" if solver.is_exact else "no")

    def test_every_solver_has_a_section(self) -> None:
        classes = [solver.__name__ for solver in SOLVERS.values()]
        found = sections(read("docs/solvers.md"))
        assert [name for name in found if name in classes] == classes

    def test_portfolio_is_the_one_described(self) -> None:
        text = sections(read("docs/solvers.md"))["Which one to choose"]
        described = re.findall(
            r"`(\w+)`", text.split("It runs ")[1].split("in this")[0]
        )
        assert described == [solver.__name__ for solver in AUTO]

    def test_how_it_works_names_the_same_ones(self) -> None:
        text = sections(read("docs/how-it-works.md"))["3 Plan"]
        assert len(AUTO) == 8
        assert '`solver="auto"` runs eight' in text
        listed = "".join(re.findall(r"^\d\. (.*?)[:,]", text, re.MULTILINE))
        assert set(re.findall(r"`(\w+)`", listed)) == {one.__name__ for one in AUTO}

    def test_readme_says_how_many_there_are(self) -> None:
        assert "twenty solvers" in read("README.md")
        assert len(SOLVERS) == 20


class TestRooms:
    """The page of rooms has every room, and its answers are files that exist."""

    PACKAGE = ROOT / "src/remat"
    QUESTIONS = 20

    @pytest.mark.parametrize("page", ["docs/design/rooms.md", "docs/how-it-works.md"])
    def test_every_room_is_there(self, page: str) -> None:
        found = {path.parent.name for path in self.PACKAGE.glob("*/__init__.py")}
        named = {
            name for row in rows(read(page)) for name in re.findall(r"`(\w+)`", row[0])
        }
        assert found <= named

    def test_each_question_of_the_newcomer_has_a_file(self) -> None:
        text = sections(read("docs/design/rooms.md"))["A newcomer's test"]
        asked = re.findall(r"^(\d+)\. .*\?$", text, re.MULTILINE)
        assert asked == [str(number + 1) for number in range(self.QUESTIONS)]
        answers = rows(text)
        assert [number for number, _ in answers] == asked
        for _, answer in answers:
            assert (self.PACKAGE / answer.strip("`")).is_file(), answer


def public_names() -> set[str]:
    """Return what a user finds in the package: no modules, nothing private."""
    return {
        name
        for name in dir(remat)
        if not name.startswith("_")
        and not inspect.ismodule(getattr(remat, name))
        and getattr(getattr(remat, name), "__module__", "").startswith("remat")
    }


def signature(name: str) -> str:
    """Return a function's parameters and defaults as the reference writes them."""
    found = inspect.signature(getattr(remat, name))
    plain = [
        p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()
    ]
    result = found.return_annotation
    kind = result if isinstance(result, str) else result.__name__
    bare = found.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    return f"remat.{name}{bare} -> {kind}"


def study_line(model: str, case: str, **more: Any) -> dict[str, Any]:
    """Return a line of results of a study, as far as the table of models reads it."""
    line: dict[str, Any] = {
        "model": model,
        "case": case,
        "status": "ok",
        "settings": {"model": {"tiny": False}},
        "plain_peak_bytes": 100 << 20,
        "measured_peak_bytes": 40 << 20,
        "slowdown": 1.25,
        "is_within_budget": True,
        "differs_from_captured": {"count": 0},
    }
    return line | more


class TestHeadline:
    """The table of ten models says what the recorded results say, the README too."""

    def written(self, folder: Path, *lines: dict[str, Any]) -> list[list[str]]:
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / "budgets.jsonl").write_text(text, encoding="utf-8")
        page = folder / "page.md"
        page.write_text("a\n<!-- headline -->\nold\n<!-- end headline -->\nb\n")
        headline.main(["--results", str(folder), "--page", str(page)])
        text = page.read_text()
        assert text.startswith("a\n<!-- headline -->\n")
        assert text.endswith("<!-- end headline -->\nb\n")
        assert "old" not in text
        return rows(text)

    def test_kept_budgets(self, tmp_path: Path) -> None:
        found = self.written(
            tmp_path,
            study_line("gpt2", "plain"),
            study_line("gpt2", "60%", measured_peak_bytes=60 << 20, slowdown=1.1),
            study_line("gpt2", "40%"),
        )
        assert found == [["gpt2", "100.0 MiB", "60.0 MiB, 1.10 x", "40.0 MiB, 1.25 x"]]

    def test_refused_budgets_show_the_smallest(self, tmp_path: Path) -> None:
        found = self.written(
            tmp_path,
            study_line("vgg19", "plain"),
            study_line("vgg19", "60%", status="below floor"),
            study_line("vgg19", "40%", status="below floor"),
            study_line("vgg19", "floor", measured_peak_bytes=80 << 20),
        )
        assert found == [["vgg19", "100.0 MiB", "", "smallest: 80.0 MiB, 1.25 x"]]

    def test_a_broken_promise_is_told(self, tmp_path: Path) -> None:
        broken = {"is_within_budget": False, "differs_from_captured": {"count": 2}}
        (row,) = self.written(
            tmp_path, study_line("t5", "plain"), study_line("t5", "40%", **broken)
        )
        assert row[3] == "40.0 MiB, 1.25 x, **over budget**, **not exact**"

    def test_page_has_the_place(self) -> None:
        assert "<!-- headline -->\n" in read("docs/studies.md")
        with pytest.raises(ValueError, match="headline"):
            headline.fill("nothing", headline.Results(ROOT))

    def test_readme_shows_rows_of_the_table(self) -> None:
        table = rows(sections(read("docs/studies.md"))["In one table"])
        shown = rows(sections(read("README.md"))["Measured"])
        assert len(shown) == 3
        assert all(row in table for row in shown)


class TestReference:
    """The reference names everything that is public, with its signature."""

    TEXT = read("docs/reference.md")

    def test_there_are_public_names(self) -> None:
        assert {"fit", "plan", "Plan", "BudgetError"} <= public_names()

    @pytest.mark.parametrize("name", sorted(public_names()))
    def test_name_is_documented(self, name: str) -> None:
        listed = {row[0] for row in rows(sections(self.TEXT)["Exceptions"])}
        assert name in sections(self.TEXT) or f"`{name}`" in listed

    @pytest.mark.parametrize(
        "name",
        [n for n in sorted(public_names()) if inspect.isfunction(getattr(remat, n))],
    )
    def test_signature_is_that_of_the_code(self, name: str) -> None:
        (shown,) = blocks(sections(self.TEXT)[name], "text")
        assert " ".join(shown.split()) == signature(name)

    @pytest.mark.parametrize("name", ["Plan", "VerifyReport", "Measurement"])
    def test_attributes_exist_and_none_is_missing(self, name: str) -> None:
        cells = [row[0] for row in rows(sections(self.TEXT)[name])]
        shown = set(re.findall(r"`(\w+)(?:\(\w*\))?`", " ".join(cells)))
        owner = getattr(remat, name)
        fields = {field.name for field in dataclasses.fields(owner)}
        public = {n for n in vars(owner) if not n.startswith("_")} | fields
        assert shown | {"summary"} >= public
        assert shown <= public


class TestCommandLine:
    """The page of the command line has every command, option and exit code."""

    SECTIONS = sections(read("docs/command-line.md"))

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
    def test_every_option_is_described(self, command: Any) -> None:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        text = self.SECTIONS[f"remat {command.name}"]
        shared = self.SECTIONS["Options of several commands"]
        for action in parser._actions:
            for option in [o for o in action.option_strings if o.startswith("--")]:
                assert f"`{option}" in text + shared, option

    def test_no_option_is_invented(self) -> None:
        known = {"--version"}
        for command in COMMANDS:
            parser = argparse.ArgumentParser()
            command.add_arguments(parser)
            known |= {o for a in parser._actions for o in a.option_strings}
        text = " ".join(self.SECTIONS.values())
        assert set(re.findall(r"`(--[a-z-]+)", text)) <= known

    def test_exit_codes_are_those_of_the_code(self) -> None:
        shown = [(int(r[0]), r[1]) for r in rows(self.SECTIONS["Exit codes"])]
        assert shown == [(code.value, f"`{code.name}`") for code in ExitCode]
