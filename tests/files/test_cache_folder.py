"""Documents within a size: the ones used least lately go, and nobody else's."""

import os
from pathlib import Path

from remat.files.cache_folder import DocumentFolder


def folder_of(path: Path, most_bytes: int = 10**6) -> DocumentFolder:
    return DocumentFolder(path=path / "kept", kind="kept", most_bytes=most_bytes)


def key(number: int) -> str:
    return f"{number:064x}"


def test_what_was_used_least_lately_goes_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for number in range(4):
        folder.write(key(number), {"text": "x" * 1000})
        os.utime(folder.path / f"{key(number)}.json", ns=(number, number))
    size = folder.files()[0][1]
    # To read is to use.
    assert folder.read(key(0), lambda payload: payload) == {"text": "x" * 1000}
    folder_of(tmp_path, 3 * size).write(key(4), {"text": "x" * 1000})
    kept = [file.stem for file, _ in folder.files()]
    assert sorted(kept) == [key(0), key(3), key(4)]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    folder.path.mkdir()
    (folder.path / "plan.json").write_text("my own", encoding="utf-8")
    left = folder.path / f".{key(1)}.json.0123abcd.tmp"
    left.write_text("of a process that was killed", encoding="utf-8")
    folder.write(key(0), {})
    assert [file.name for file in folder.path.iterdir()] == ["plan.json"]


def test_there_need_be_no_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert folder.files() == []
    assert folder.read(key(0), lambda payload: payload) is None
    assert not folder.path.exists()
