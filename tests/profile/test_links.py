"""Links of this machine: measured, kept, and measured again where that is damaged."""

from pathlib import Path
from typing import Any

import pytest

from remat.core.errors import InvalidPlatformError, ProfileError
from remat.profile import links
from remat.profile.cache import CostCache
from remat.profile.links import (
    common_device,
    default_devices,
    measured_link,
    measured_platform,
)


def test_all_pairs_are_linked_in_both_directions(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    platform = measured_platform(
        ["cpu", "cpu:1", "host"],
        cache=CostCache(tmp_path),
        on_progress=lambda name, share: seen.append((name, share)),
    )
    assert platform.names == ("cpu", "cpu:1", "host")
    assert [d.kind for d in platform.devices] == ["cpu", "cpu", "host"]
    pairs = {(link.source, link.target) for link in platform.links}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert len(seen) == 6
    assert seen[0] == ("measuring the link from cpu to cpu:1", 0.0)
    # One place, so one measurement.
    assert len({(k.bytes_per_s, k.latency_ns) for k in platform.links}) == 1


def test_a_measurement_is_kept_and_a_damaged_one_repeated(
    tmp_path: Path, monkeypatch: Any
) -> None:
    cache = CostCache(tmp_path)
    first = measured_link("cpu", "cpu", cache=cache)
    assert min(first) > 0
    times = iter([1_000, 2_000] * 9)
    monkeypatch.setattr(links, "_fastest_copy_ns", lambda *_: next(times))
    assert measured_link("cpu", "cpu", cache=CostCache(tmp_path)) == first
    for damaged in ({}, {"bytes_per_s": 0, "latency_ns": 1}, {"bytes_per_s": "x"}):
        cache.put("link from cpu to cpu", damaged)
        assert measured_link("cpu", "cpu", cache=cache) == (2**26 * 10**6, 1_000)


def test_a_copy_that_fails_names_the_devices(monkeypatch: Any) -> None:
    def fail(*_: object) -> int:
        msg = "no room"
        raise RuntimeError(msg)

    monkeypatch.setattr(links, "_fastest_copy_ns", fail)
    with pytest.raises(ProfileError, match=r"a copy from cpu to cpu .*: no room"):
        measured_link("cpu", "cpu")


@pytest.mark.parametrize("name", ["", "gpu", "cpu:", "cpu:x", "cuda:-1", "CPU"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidPlatformError, match=f"unknown device {name!r}"):
        common_device(name)


def test_names_are_given_once() -> None:
    with pytest.raises(InvalidPlatformError, match=r"2 devices .* called 'cpu'"):
        measured_platform(["cpu", "cpu"])


def test_there_is_always_host_memory() -> None:
    assert default_devices()[-1] == "host"
