import json
import threading
from pathlib import Path

import pytest
import torch

from remat.profile import CostCache, CostCacheWarning, cache_directory
from remat.profile.cache import environment


def test_directory_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "explicit"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "base"))
    assert cache_directory() == tmp_path / "explicit"
    monkeypatch.delenv("REMAT_CACHE_DIR")
    assert cache_directory() == tmp_path / "base" / "remat"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "remat"


def test_what_is_saved_is_found_again(tmp_path):
    cache = CostCache(tmp_path / "deep" / "er")
    cache.put("neg", {"cost_ns": 5, "sizes": [1, 2]})
    assert CostCache(tmp_path / "deep" / "er").get("neg") is None
    cache.save()
    again = CostCache(tmp_path / "deep" / "er")
    assert again.get("neg") == {"cost_ns": 5, "sizes": [1, 2]}
    assert again.get("abs") is None
    assert len(again) == 1


def test_nothing_is_written_before_there_is_something(tmp_path):
    CostCache(tmp_path / "none").save()
    assert not (tmp_path / "none").exists()


def test_only_the_file_remains(tmp_path):
    cache = CostCache(tmp_path)
    cache.put("neg", {})
    cache.save()
    assert list(tmp_path.iterdir()) == [cache.path]


def test_another_number_of_threads_has_another_file(tmp_path):
    threads = torch.get_num_threads()
    first = CostCache(tmp_path).path
    torch.set_num_threads(threads + 1)
    try:
        second = CostCache(tmp_path).path
    finally:
        torch.set_num_threads(threads)
    assert first != second
    assert CostCache(tmp_path).path == first


def test_environment_names_torch_and_the_processor():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["processor"]


def test_two_users_of_one_file_keep_both_findings(tmp_path):
    first, second = CostCache(tmp_path), CostCache(tmp_path)
    first.put("neg", {"cost_ns": 1})
    second.put("abs", {"cost_ns": 2})
    first.save()
    second.save()
    merged = CostCache(tmp_path)
    assert merged.get("neg") == {"cost_ns": 1}
    assert merged.get("abs") == {"cost_ns": 2}
    # The second one knows what the first wrote.
    assert second.get("neg") == {"cost_ns": 1}


def test_readers_never_see_half_a_file(tmp_path):
    def write(name: str) -> None:
        for count in range(20):
            cache = CostCache(tmp_path)
            cache.put(f"{name}{count}", {"text": "x" * 2000})
            cache.save()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not list(tmp_path.glob("*damaged*"))
    assert json.loads(CostCache(tmp_path).path.read_text(encoding="utf-8"))["costs"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'{"costs": 3}',
        b'{"costs": {"a": 1}}',
        b"\xff\xfe\x00",
        b"null",
    ],
)
def test_a_damaged_file_is_put_aside_and_said_once(tmp_path, content):
    path = CostCache(tmp_path).path
    path.write_bytes(content)
    with pytest.warns(CostCacheWarning, match="is damaged") as caught:
        cache = CostCache(tmp_path)
    assert len(caught) == 1
    assert len(cache) == 0
    (aside,) = tmp_path.glob("*damaged*")
    assert aside.read_bytes() == content
    assert aside.name in str(caught[0].message)
    cache.put("neg", {"cost_ns": 1})
    cache.save()
    assert CostCache(tmp_path).get("neg") == {"cost_ns": 1}


def test_a_directory_that_cannot_be_written_gives_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    cache = CostCache(tmp_path / "elsewhere")
    cache._directory = tmp_path / "file"
    cache.put("neg", {"cost_ns": 1})
    with pytest.warns(CostCacheWarning, match="REMAT_CACHE_DIR"):
        cache.save()
    # Said once: warnings are errors in this suite.
    cache.save()
    # The process goes on with what it measured.
    assert cache.get("neg") == {"cost_ns": 1}


def test_a_file_that_cannot_be_read_gives_a_warning(tmp_path):
    CostCache(tmp_path).path.mkdir()
    with pytest.warns(CostCacheWarning, match="cannot be read"):
        assert len(CostCache(tmp_path)) == 0


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    cache = CostCache(tmp_path)
    cache.put("neg", {"cost_ns": 1})
    cache.save()
    cache.put("abs", {"cost_ns": 2})

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(CostCacheWarning, match="No space left"):
        cache.save()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [cache.path]
    assert CostCache(tmp_path).get("neg") == {"cost_ns": 1}


def test_a_forgotten_record_stays_forgotten_in_this_process(tmp_path):
    cache = CostCache(tmp_path)
    cache.put("neg", {})
    cache.discard("neg")
    cache.discard("never there")
    assert cache.get("neg") is None
