"""The study of many processes: bytes as by the formulas, and a column for each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matplotlib.patches import Rectangle
from studies.scale import FORMULAS, PARTS, differences, main, scale_figure, scale_table

import remat

SMALL = ["--child", "--layers", "2", "--tokens", "8", "--processes", "64"]

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


def small_llama(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a narrow Llama without memory, with rows that 64 does not divide."""
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16(), {}


def without_search(plan: Callable[..., remat.Plan]) -> Callable[..., remat.Plan]:
    """Return a planner whose smallest known budget is that of its first plan.

    To look for a smaller one takes ten times as long, and changes no size.
    """
    peaks_bytes: list[int] = []

    def planned(*args: Any, budget: int | str, **options: Any) -> remat.Plan:
        if budget == 1:
            raise remat.BudgetError("", budget_bytes=1, required_bytes=peaks_bytes[0])
        made = plan(*args, budget=budget, **options)
        peaks_bytes.append(made.peak_bytes)
        return made

    return planned


def test_a_line_a_column_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("studies.scale.llama", small_llama)
    monkeypatch.setattr("remat.plan", without_search(remat.plan))
    assert main([*SMALL, "--results", str(tmp_path)]) == 0
    path = tmp_path / "scale.jsonl"
    line = json.loads(path.read_text(encoding="utf-8"))
    plans = line["plans"]
    assert set(line["formula_bytes"]) == set(FORMULAS)
    assert 0 < line["formula_bytes"]["layer_reduced"] < line["parameters"]
    assert plans["smallest"]["peak_bytes"] <= plans["plain"]["peak_bytes"]
    for plan in plans.values():
        assert plan["bytes"] == line["formula_bytes"]
        assert sum(plan["peak_parts_bytes"].values()) == plan["peak_bytes"]
    # Only the whole model has a column.
    assert "64 processes" not in scale_table(path)
    monkeypatch.setattr("studies.scale.LAYERS", 2)
    assert scale_table(path).startswith("| bytes of each process | formula | 64 proc")
    bars = [bar for bar in scale_figure(path).patches if isinstance(bar, Rectangle)]
    heights = [bar.get_height() for bar in bars]
    assert len(heights) == len(PARTS) * len(plans)
    assert sum(heights) * 2**30 == pytest.approx(
        sum(plan["peak_bytes"] for plan in plans.values())
    )
    # What is not as by the formula stands out.
    plans["smallest"]["bytes"]["layer_whole"] += 1
    path.write_text(json.dumps(line), encoding="utf-8")
    layer_bytes = line["formula_bytes"]["layer_whole"]
    shown = f"{layer_bytes} and {layer_bytes + 1} B, by the formula {layer_bytes} B"
    assert f"| **{shown}** |" in scale_table(path)


def test_a_difference_is_named_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    named = differences({"layer_whole": {3, 5}}, {"layer_whole": 3})
    assert named == ["a layer, gathered: 3, 5 bytes in the plan, 3 by the formula"]
    assert not differences({"layer_whole": {3}}, {"layer_whole": 3})
    found = {"plans": {}, "differences": named}
    monkeypatch.setattr("studies.scale.study", lambda **_case: found)
    assert main([*SMALL, "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == named
