"""The study of two logical devices: its records and its table in the documentation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from studies.record import read
from studies.two_devices import Network
from studies.two_devices_run import FILE, HEADER, measure, table
from torch import nn

from studies import two_devices_run as study

PAGE = Path(__file__).parents[2] / "docs" / "xengine.md"


def test_table_of_the_page_is_what_is_recorded():
    printed = table(read(FILE)).splitlines()
    text = PAGE.read_text(encoding="utf-8")
    shown = text.split(HEADER)[1].split("\n\n")[0].strip().splitlines()
    assert shown == printed


def test_recorded_runs_keep_to_their_budgets_bit_for_bit():
    lines = read(FILE)
    assert lines
    for line in lines:
        report = line["report"]
        assert report["is_exact"]
        assert report["is_within_budget"]
        for device in report["devices"]:
            assert device["measured_bytes"] <= device["budget_bytes"]


def test_a_small_network_is_planned_and_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
        for _ in range(4):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(*layers)

    small = Network(make, 32, (8,))
    monkeypatch.setitem(study.NETWORKS, "small", small)
    torch.manual_seed(0)
    line: dict[str, Any] = measure("small", 8, 3)
    report = line["report"]
    assert line["case"] == "below both floors"
    assert report["is_exact"]
    assert report["is_within_budget"]
    assert all(device["run_count"] for device in report["plan"]["devices"])
    assert "| small | 8 |" in table([line])
