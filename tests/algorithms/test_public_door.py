"""The public door to the papers: what it documents, and published values through it."""

import ast
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from tests.chain_tables import CONVENTIONS, label, oracle_table

from remat import algorithms
from remat.algorithms import (
    ForwardGraph,
    LowerSetQuery,
    StageChain,
    StorageLevel,
    all_lower_sets,
    ancestor_sets,
    plan_chain,
    plan_disk_revolve,
    plan_hrevolve,
    plan_join,
    plan_rotor,
    revolve_forwards,
    sweep_lower_sets,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
(SECTION,) = re.findall(
    r"^## The papers' programs\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE
)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
EXPORTS = {
    name: value
    for name, value in vars(algorithms).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = sorted(n for n, value in EXPORTS.items() if inspect.isfunction(value))
RECORDS = sorted(
    n for n, v in EXPORTS.items() if isinstance(v, type) and is_dataclass(v)
)
HEADING = re.compile(r"^(\w+)\n-+$", re.MULTILINE)


def documented(name: str) -> dict[str, str]:
    """Return the sections of a docstring in numpy's style."""
    _, *found = HEADING.split(inspect.getdoc(EXPORTS[name]) or "")
    return dict(zip(found[::2], found[1::2], strict=True))


def described(section: str) -> set[str]:
    """Return the names that a section of parameters describes."""
    entries = re.findall(r"^(\w[\w, ]*)$", section, re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_export_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in SECTION


def test_every_name_of_the_page_is_exported() -> None:
    for code in EXAMPLES:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "remat.algorithms"
                assert {alias.name for alias in node.names} <= set(EXPORTS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_says_parameters_errors_complexity_source_and_example(
    name: str,
) -> None:
    found = documented(name)
    assert described(found["Parameters"]) == set(
        inspect.signature(EXPORTS[name]).parameters
    )
    assert "Error" in found["Raises"]
    text = inspect.getdoc(EXPORTS[name]) or ""
    assert "O(" in text
    assert re.search(r"\b(19|20)\d\d\b", found["References"])
    assert ">>> " in found["Examples"]


@pytest.mark.parametrize("name", RECORDS)
def test_record_says_what_its_fields_are(name: str) -> None:
    own = inspect.get_annotations(EXPORTS[name])
    assert described(documented(name).get("Parameters", "")) == set(own)


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_of_the_page_has_few_lines_and_claims_a_value(code: str) -> None:
    statements = [
        node for node in ast.parse(code).body if not isinstance(node, ast.ImportFrom)
    ]
    assert len(statements) <= 4
    assert isinstance(statements[-1], ast.Assert)


def test_there_is_an_example_of_each_method() -> None:
    code = "".join(EXAMPLES)
    plans = {name for name in FUNCTIONS if name.startswith("plan_")}
    shown = {name for name in plans if re.search(rf"\b{name}\(", code)}
    # Variants that take the same arguments as one that is shown.
    assert plans - shown == {"plan_join_by_branch", "plan_join_any_turns"}


class TestPublishedValues:
    """Tables of the papers and of their published code, through the public door."""

    # Herrmann and Pallez's code.
    @pytest.mark.parametrize(
        ("slots", "counts"),
        [
            (2, "0 1 2 4 6 8 11 14 17 20 24 28 32 36 40 45 50 55 60 65 70"),
            (3, "0 1 2 3 5 7 9 11 13 15 18 21 24 27 30 33 36 39 42 45 49"),
        ],
    )
    def test_revolve(self, slots: int, counts: str) -> None:
        expected = [int(count) for count in counts.split()]
        assert [revolve_forwards(length, slots) for length in range(21)] == expected

    def test_disk_revolve(self) -> None:
        disk = StorageLevel(slots=0, write_ns=5, read_ns=5)
        found = [plan_disk_revolve(length, 2, disk).cost_ns for length in range(13)]
        assert found == [1, 3, 5, 8, 11, 14, 18, 22, 26, 30, 35, 40, 45]

    def test_hrevolve(self) -> None:
        host = StorageLevel(slots=3, write_ns=2, read_ns=2)
        levels = [StorageLevel(slots=1), host]
        plans = [plan_hrevolve(length, levels) for length in (0, 5, 10, 15)]
        assert [plan and plan.cost_ns for plan in plans] == [1, 19, 41, 63]

    def test_rotor(self) -> None:
        for case in oracle_table("rotor_oracle.json")["instances"]:
            chain = StageChain.of_lists(
                forward_ns=case["uf"],
                backward_ns=case["ub"],
                output_bytes=case["wa"][1:],
                saved_bytes=[
                    inside - output
                    for inside, output in zip(case["wA"], case["wa"][1:], strict=True)
                ],
                input_bytes=case["wa"][0],
            )
            for budget, published, _ in case["rows"]:
                plan = plan_rotor(chain, budget, beyond_persistence=False)
                assert (plan and plan.cost_ns) == published

    def test_joins_and_chains(self) -> None:
        tables = oracle_table("join_oracle.json")["once"]
        for convention in CONVENTIONS:
            shapes = tables.get(label(convention), {})
            for shape in ("5", "3,3", "2,2,2"):
                lengths = [int(length) for length in shape.split(",")]
                for units, (expected, _) in shapes.get(shape, {}).items():
                    costs = [[1] * length for length in lengths]
                    plan = plan_join(costs, int(units), convention)
                    assert (plan and plan.forward_cost) == expected
                    if len(lengths) == 1:
                        alone = plan_chain(lengths[0], int(units), convention)
                        assert (alone and alone.forward_cost) == expected

    def test_lower_sets(self) -> None:
        for case in oracle_table("lowersets_oracle.json")["instances"]:
            graph = ForwardGraph.of_values(
                case["M"], case["T"], [tuple(edge) for edge in case["edges"]]
            )
            families = {
                "exact_TC": all_lower_sets(graph, 1 << case["n"]),
                "pruned_TC": ancestor_sets(graph),
            }
            for kind, family in families.items():
                assert family is not None
                queries = [
                    LowerSetQuery(budget_bytes=row["budget"], charge_last=True)
                    for row in case["budgets"]
                ]
                found = sweep_lower_sets(graph, family, queries, refinements=0)
                expected = [
                    row[kind] and row[kind]["overhead"] for row in case["budgets"]
                ]
                assert [answer and answer.overhead for answer in found] == expected
