"""The devices that come with the package, and files of others."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from remat.core.errors import FileFormatError, InvalidPlatformError
from remat.core.hardware import CLASSES, Hardware
from remat.files.hardware import (
    chosen_hardware,
    hardware_named,
    hardware_names,
    load_hardware,
    save_hardware,
)

T, GB = 10**12, 10**9

DATA_SHEETS = {
    # Bandwidth, float32, bfloat16 dense: what the makers' tables say.
    "a100-40gb": (1555 * GB, 19.5, 312),
    "a100-80gb": (2039 * GB, 19.5, 312),
    "h100-80gb": (3350 * GB, 67, 989.5),
    "h200": (4800 * GB, 67, 989.5),
    "b200": (8000 * GB, 75, 2250),
    "rtx-3090": (936 * GB, 35.6, 71),
    "rtx-4090": (1008 * GB, 82.6, 165.2),
    "rtx-5090": (1792 * GB, 104.8, 209.5),
    "mi300x": (5300 * GB, 163.4, 1307.4),
    "l4": (300 * GB, 30.3, 121),
}


def test_the_devices_are_those_of_the_data_sheets() -> None:
    assert set(hardware_names()) == set(DATA_SHEETS)
    for name, (bandwidth, single, half) in DATA_SHEETS.items():
        found = hardware_named(name)
        assert found.name == name
        assert found.bytes_per_s == bandwidth
        assert found.rate("float32") == pytest.approx(single * T)
        assert found.rate("bfloat16") == pytest.approx(half * T)
        assert 0.2 * GB < found.context_bytes < GB


@pytest.mark.parametrize("name", sorted(DATA_SHEETS))
def test_every_number_has_a_source(name: str) -> None:
    found = hardware_named(name)
    flat = {f.name for f in fields(found)} - {"name", "title", "kind", "sources"}
    flat -= {"flops_per_s", "percent"}
    flat |= {f"flops_per_s.{key}" for key in found.flops_per_s}
    flat |= {f"percent.{key}" for key in CLASSES}
    assert set(found.sources) == flat
    assert all(len(text) > 10 for text in found.sources.values())


def test_an_unknown_device_gets_the_list_and_a_guess() -> None:
    with pytest.raises(
        InvalidPlatformError, match=r"mean 'h100-80gb'.*a100-40gb"
    ) as info:
        hardware_named("H100")
    assert all(name in str(info.value) for name in hardware_names())


def test_a_device_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    own = replace(hardware_named("l4"), name="mine", memory_bytes=10 * GB)
    save_hardware(path, own)
    assert load_hardware(path) == own == chosen_hardware(str(path))
    assert chosen_hardware(own) is own


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"context_bytes": 10**12}, "nothing is left"),
        ({"kind": "tpu"}, "must be one of cuda, rocm, cpu"),
        ({"flops_per_s": {"bfloat16": 1}}, "one for float32"),
        ({"percent": {"matmul": 50}}, "it must have matmul, convolution"),
        ({"percent": dict.fromkeys(CLASSES, 101)}, "more than 100"),
        ({"percent": dict.fromkeys(CLASSES, 0)}, "at least 1"),
        ({"sources": {}}, "have no source: memory_bytes"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidPlatformError, match=words):
        replace(hardware_named("l4"), **change)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_hardware(path, hardware_named("l4"))
    document = json.loads(path.read_text())
    document["payload"]["kind"] = "tpu"
    path.write_text(json.dumps(document))
    with pytest.raises(
        FileFormatError, match=r"mine.json: kind of device 'l4' is 'tpu'"
    ):
        load_hardware(path)


def test_what_is_no_device_is_refused() -> None:
    wrong: Any = 7
    with pytest.raises(TypeError, match="device is a int"):
        chosen_hardware(wrong)
    assert isinstance(chosen_hardware("l4"), Hardware)
