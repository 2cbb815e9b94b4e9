"""Recorded histories of an allocator, replayed.

The snapshot is written by hand in the format of ``torch.cuda.memory._snapshot()``, and
its addresses follow from the rules of the allocator, not from the model.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from remat.core.allocator import MIB
from remat.core.errors import FileFormatError
from remat.memory.snapshots import load_snapshot, replay_snapshot

BASE = 0x7F0000000000
SIDE = 94_000


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": 0,
        "frames": [],
    }


def block(address: int, size: int, state: str, requested: int = 0) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": [],
    }


def snapshot() -> dict[str, Any]:
    """Return a history of two segments, another stream, and an emptied cache."""
    # cudaMalloc puts the later segment below the first.
    large, small, third = BASE + 64 * MIB, BASE, BASE + 256 * MIB
    trace = [
        entry("segment_alloc", large, 20 * MIB),
        entry("alloc", large, 3 * MIB),
        entry("alloc", large + 3 * MIB, 4 * MIB),
        entry("segment_alloc", small, 2 * MIB),
        entry("alloc", small, 1000),
        # Freed at once: 3 MiB at the beginning.
        entry("free_requested", large, 3 * MIB),
        entry("free_completed", large, 3 * MIB),
        # The smallest that fits is there, not the 13 MiB at the end.
        entry("alloc", large, 2 * MIB),
        # Used by another stream: it is free for others only when that is noticed.
        entry("free_requested", large + 3 * MIB, 4 * MIB),
        entry("alloc", large + 7 * MIB, 4 * MIB),
        entry("free_completed", large + 3 * MIB, 4 * MIB),
        entry("alloc", large + 3 * MIB, 4 * MIB),
        entry("segment_alloc", third, 32 * MIB, SIDE),
        entry("alloc", third, 31 * MIB, SIDE),
        entry("free_requested", third, 31 * MIB, SIDE),
        entry("free_completed", third, 31 * MIB, SIDE),
        entry("segment_free", third, 32 * MIB, SIDE),
        entry("snapshot", 0, 0),
    ]
    used = "active_allocated"
    segments = [
        {
            "device": 0,
            "address": small,
            "total_size": 2 * MIB,
            "stream": 0,
            "segment_type": "small",
            "blocks": [
                block(small, 1024, used, 1000),
                block(small + 1024, 2 * MIB - 1024, "inactive"),
            ],
        },
        {
            "device": 0,
            "address": large,
            "total_size": 20 * MIB,
            "stream": 0,
            "segment_type": "large",
            "blocks": [
                # 1 MiB is not split off.
                block(large, 3 * MIB, used, 2 * MIB),
                block(large + 3 * MIB, 4 * MIB, used, 4 * MIB),
                block(large + 7 * MIB, 4 * MIB, used, 4 * MIB),
                block(large + 11 * MIB, 9 * MIB, "inactive"),
            ],
        },
    ]
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
    }


def expandable_snapshot() -> dict[str, Any]:
    """Return a history with expandable segments, which grow by 20 MiB."""
    trace = [
        entry("segment_map", BASE, 20 * MIB),
        entry("alloc", BASE, 15 * MIB),
        entry("segment_map", BASE + 20 * MIB, 20 * MIB),
        entry("alloc", BASE + 15 * MIB, 25 * MIB),
        entry("free_requested", BASE + 15 * MIB, 25 * MIB),
        entry("free_completed", BASE + 15 * MIB, 25 * MIB),
        entry("segment_unmap", BASE + 20 * MIB, 20 * MIB),
    ]
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 20 * MIB,
        "stream": 0,
        "segment_type": "large",
        "blocks": [
            block(BASE, 15 * MIB, "active_allocated", 15 * MIB),
            block(BASE + 15 * MIB, 5 * MIB, "inactive"),
        ],
    }
    settings = {"last_allocator_settings": "expandable_segments:True"}
    return {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": settings,
    }


def test_a_history_is_replayed_address_for_address() -> None:
    replay = replay_snapshot(snapshot())
    assert replay.differences == ()
    assert replay.is_exact
    assert replay.call_count == 4
    assert replay.reserved_bytes == 54 * MIB


def test_a_history_with_expandable_segments() -> None:
    replay = replay_snapshot(expandable_snapshot())
    assert replay.differences == ()
    assert replay.reserved_bytes == 40 * MIB


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # An allocator that takes the largest block, or splits 1 MiB off.
        (lambda s: s["device_traces"][0][7].update(addr=BASE + 71 * MIB), "block of"),
        (lambda s: s["segments"][1]["blocks"].pop(), "segment at"),
        (lambda s: s["device_traces"][0][0].update(size=22 * MIB), "segment_alloc of"),
    ],
)
def test_another_allocator_is_noticed(change: Any, said: str) -> None:
    other = copy.deepcopy(snapshot())
    change(other)
    replay = replay_snapshot(other)
    assert not replay.is_exact
    assert any(said in line for line in replay.differences)


def test_what_is_no_whole_history_is_refused() -> None:
    cut = snapshot()
    del cut["device_traces"][0][:2]
    with pytest.raises(FileFormatError, match="record from before the first"):
        replay_snapshot(cut)
    with pytest.raises(FileFormatError, match="cannot be replayed"):
        replay_snapshot(snapshot(), device=3)
    odd = snapshot()
    odd["device_traces"][0][0]["action"] = "nonsense"
    with pytest.raises(FileFormatError, match="'nonsense', which is unknown"):
        replay_snapshot(odd)


def test_files_are_read_and_nothing_in_them_is_run(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    assert replay_snapshot(load_snapshot(path)).is_exact
    for content, said in (
        (pickle.dumps(Path("x")), "which no snapshot does"),
        (pickle.dumps([1]), "it has no device_traces"),
        (b"", "no snapshot of an allocator could be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=said):
            load_snapshot(path)
    with pytest.raises(FileFormatError, match="could be read"):
        load_snapshot(tmp_path / "absent")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_the_real_allocator_does_the_same(seed: int) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    # From the first allocation on: in a process of its own this is the whole history.
    if torch.cuda.memory_reserved():
        torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("the allocator was used before, so its history is not whole")
    from tests.memory.test_caching_allocator import drawn_requests  # noqa: PLC0415

    from remat.torch_compat.accelerators import recorded_history  # noqa: PLC0415

    try:
        with recorded_history() as history:
            live: dict[int, Any] = {}
            for kind, number, size, _ in drawn_requests(2_000, seed, most_live=40):
                if kind == 0:
                    live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
                elif kind == 1:
                    del live[number]
                elif kind == 4:
                    torch.cuda.empty_cache()
            recorded = history()
            live.clear()
    finally:
        torch.cuda.empty_cache()
    assert replay_snapshot(recorded).differences == ()
