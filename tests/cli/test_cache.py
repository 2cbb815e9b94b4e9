"""``remat cache``: says what is kept, and removes nothing else."""

import json
from pathlib import Path

import pytest

from remat.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "2 MiB")
    (tmp_path / "kept-plans").mkdir()
    (tmp_path / "kept-plans" / f"{7:064x}.json").write_bytes(b"x" * 2048)
    (tmp_path / "costs-v3-0123456789abcdef.json").write_bytes(b"x" * 1024)
    (tmp_path / "costs.txt").write_bytes(b"mine")
    return tmp_path


def test_what_is_kept_is_said(
    folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert text == (
        f"cache in {folder}\n"
        "  plans  1 files, 2.00 KiB (at most 2.00 MiB)\n"
        "  costs  1 files, 1.00 KiB\n"
    )
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "0")
    assert main(["cache"]) == 0
    assert "(none are kept, by REMAT_PLAN_CACHE_SIZE)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "left"),
    [("plans", ["costs-v3-0123456789abcdef.json"]), ("all", []), ("costs", ["plans"])],
)
def test_what_is_asked_for_is_removed(
    what: str, left: list[str], folder: Path, capsys
) -> None:
    assert main(["cache", "--clear", what, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    removed = [facts[name]["removed_count"] for name in ("plans", "costs")]
    assert removed == [int(what != "costs"), int(what != "plans")]
    assert (folder / "costs.txt").exists()
    kept = ["plans"] * any((folder / "kept-plans").iterdir())
    kept += [file.name for file in folder.glob("costs-*")]
    assert kept == left
