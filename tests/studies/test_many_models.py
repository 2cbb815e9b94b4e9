"""The study of many models: definitions, what is recorded of each, and its tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from studies.definitions import Definition, Example, definitions
from studies.many_models import REFUSED, SMALLEST, TRAINED, study

from studies import breaks_tables, many_models


def test_every_definition_says_where_it_is_from() -> None:
    found = definitions()
    assert len(found) >= 60
    assert all(name == each.name and each.source for name, each in found.items())
    libraries = {each.library for each in found.values()}
    assert libraries >= {"transformers", "timm", "torchvision", "diffusers", "torch"}


def test_what_is_not_installed_is_skipped_in_words(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build() -> Example:
        raise AssertionError

    absent = Definition(name="absent", library="not_there", source="x", build=build)
    monkeypatch.setattr(many_models, "definitions", lambda: {"absent": absent})
    many_models.run(["absent"], tmp_path, 1)
    said = capsys.readouterr().out
    assert said == "absent: skipped, not_there is not installed\n"
    assert not list(tmp_path.iterdir())


OUTCOMES = {
    "coupling-flow": (TRAINED, "whole"),
    "equilibrium": (TRAINED, "breaks"),
    "variational": (SMALLEST, "whole"),
    "skip-gram-sparse": (REFUSED, "whole"),
    "gradient-penalty": (REFUSED, "breaks"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_becomes_of_a_model_is_told(name: str, tmp_path: Path) -> None:
    line = study(definitions()[name])
    assert (line["status"], line["regions"]) == OUTCOMES[name]
    if line["status"] != REFUSED:
        assert line["measured_peak_bytes"] <= line["budget_bytes"]
        # Eager PyTorch needs hardly less than a step of ours that keeps all.
        assert line["baseline_peak_bytes"] <= 1.02 * line["plain_peak_bytes"]
        assert abs(line["prediction_error"]) < 0.01
        assert line["against_captured"]["count"] == 0
    many_models.record(line, tmp_path)
    for write in breaks_tables.TABLES.values():
        assert write(tmp_path)


def test_results_of_a_budget_that_does_not_work_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attempt(*_: Any) -> dict[str, Any]:
        return {"status": SMALLEST, "required_bytes": 10, "message": "no"}

    monkeypatch.setattr(many_models, "attempt", attempt)
    line = study(definitions()["coupling-flow"])
    assert line["status"] == many_models.UNTRUE


def test_the_tables_count_what_is_recorded(tmp_path: Path) -> None:
    assert breaks_tables.refusals_list(tmp_path) == "None."
    line = {
        "name": "coupling-flow",
        "library": "torch",
        "status": REFUSED,
        "message": "it is\n refused <here>",
        "versions_of": "torch 1",
    }
    (tmp_path / "many_models.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for _ in range(2))
    )
    assert "| torch | 1 |" in breaks_tables.counts_table(tmp_path)
    said = breaks_tables.refusals_list(tmp_path)
    assert said == f"- **coupling-flow**: {REFUSED}: it is refused &lt;here>"
