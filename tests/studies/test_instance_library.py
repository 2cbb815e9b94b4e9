"""The study that fills the instance library: what it is given lands in the package."""

from dataclasses import replace
from pathlib import Path

import pytest

from remat.files.serialisation import save_schedule
from remat.testing.instances import library
from studies import instance_library


def test_a_schedule_of_others_replaces_what_it_beats_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.folder() == instance_library.FOLDER
    name, label = "vgg19", "90%"
    known = library.load_instance(name)
    slow, fast = known.best["1.05x"], known.best[label]
    before = replace(known, best={label: slow, "1.05x": slow})
    monkeypatch.setattr(instance_library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "folder", lambda: tmp_path)
    library.save_instance(tmp_path, before)
    graph = (tmp_path / f"{name}.graph.json.gz").read_bytes()
    file = tmp_path / "schedule.json"
    save_schedule(file, fast.schedule)
    arguments = [name, "--take", str(file), "--by", "somebody"]
    assert instance_library.main(arguments) == 0
    after = library.load_instance(name).best
    assert (after[label].cost_ns, after[label].found_by) == (fast.cost_ns, "somebody")
    assert after["1.05x"] == slow
    assert (tmp_path / f"{name}.graph.json.gz").read_bytes() == graph
    assert instance_library.main(arguments) == 1
