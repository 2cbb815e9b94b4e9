"""Platforms: what is consistent, and how long a copy takes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.core.errors import InvalidPlatformError
from remat.core.platform import Device, Link, MeasuredCost, Platform, single_device

TWO = (Device(name="host"), Device(name="card", kind="cuda", budget_bytes=10))


def test_one_device_without_links():
    platform = single_device(7, "cuda")
    assert platform.devices == (Device(name="cuda", kind="cuda", budget_bytes=7),)
    assert platform.links == ()
    assert single_device().devices[0].budget_bytes is None


def test_a_link_is_found_by_its_direction():
    there = Link(source=0, target=1, bytes_per_s=1)
    platform = Platform(devices=TWO, links=(there,))
    assert platform.link(0, 1) == there
    assert platform.link(1, 0) is None
    assert platform.link(0, 0) is None


@pytest.mark.parametrize(
    ("size_bytes", "bytes_per_s", "latency_ns", "time_ns"),
    [
        (0, 1, 0, 0),
        (0, 1, 5, 5),
        (1, 10**9, 0, 1),
        (1, 10**9 - 1, 0, 2),
        (1, 10**12, 3, 4),
        (2**40, 16 * 10**9, 0, 68_719_476_736),
    ],
)
def test_copy_times_round_up(
    size_bytes: int, bytes_per_s: int, latency_ns: int, time_ns: int
):
    link = Link(source=0, target=1, bytes_per_s=bytes_per_s, latency_ns=latency_ns)
    assert link.copy_ns(size_bytes) == time_ns


@given(st.integers(0, 2**50), st.integers(1, 10**12), st.integers(0, 10**6))
def test_a_copy_takes_just_long_enough(
    size_bytes: int, bytes_per_s: int, latency_ns: int
):
    link = Link(source=0, target=1, bytes_per_s=bytes_per_s, latency_ns=latency_ns)
    transfer_ns = link.copy_ns(size_bytes) - latency_ns
    assert transfer_ns * bytes_per_s >= size_bytes * 10**9
    assert (transfer_ns - 1) * bytes_per_s < size_bytes * 10**9


@pytest.mark.parametrize("budget_bytes", [0, -1])
def test_a_budget_is_positive(budget_bytes: int):
    with pytest.raises(
        InvalidPlatformError, match=f"budget_bytes of device 'cpu' is {budget_bytes}"
    ):
        Device(budget_bytes=budget_bytes)


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_ns"), [(0, 0), (-1, 0), (1, -1), (1, 10**19)]
)
def test_a_link_has_bandwidth_and_a_latency_that_can_be_counted(
    bytes_per_s: int, latency_ns: int
):
    with pytest.raises(InvalidPlatformError, match="of link 0->1 is"):
        Link(source=0, target=1, bytes_per_s=bytes_per_s, latency_ns=latency_ns)


@pytest.mark.parametrize("field", ["cost_ns", "workspace_bytes", "samples"])
def test_a_measured_cost_can_be_counted(field: str):
    cost = MeasuredCost(device="cpu", operator="mm", cost_ns=1)
    numbers: dict[str, Any] = {field: 10**19}
    words = rf"{field} of the cost of mm on device 'cpu' is 10_000"
    with pytest.raises(InvalidPlatformError, match=words):
        replace(cost, **numbers)


def test_a_platform_has_a_device():
    with pytest.raises(InvalidPlatformError, match="at least one device"):
        Platform(devices=())


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0, 2)], r"link \(0, 2\) names an unknown device"),
        ([(-1, 0)], r"link \(-1, 0\) names an unknown device"),
        ([(2, 0)], "names an unknown device"),
        ([(0, 1), (0, 1)], "given twice"),
        ([(1, 1)], "joins a device to itself"),
    ],
)
def test_links_join_two_devices_once_per_direction(
    pairs: list[tuple[int, int]], words: str
):
    links = tuple(Link(source=s, target=t, bytes_per_s=1) for s, t in pairs)
    with pytest.raises(InvalidPlatformError, match=words):
        Platform(devices=TWO, links=links)


def test_both_directions_may_be_linked():
    links = tuple(Link(source=s, target=1 - s, bytes_per_s=1) for s in (0, 1))
    assert Platform(devices=TWO, links=links).links == links
