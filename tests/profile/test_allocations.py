import os

import pytest
import torch
from torch.profiler import record_function

from remat.core.errors import ProfileError
from remat.profile.allocations import AllocationRecorder, record_allocations


def test_every_block_is_seen_with_its_sign():
    recording, result = record_allocations(lambda: torch.empty(10).numel())
    assert result == 10
    assert [a.change_bytes for a in recording.inside] == [40, -40]
    first, second = recording.inside
    assert first.address == second.address
    assert first.time_ns <= second.time_ns
    assert recording.peak_bytes() == 40


def test_peak_is_the_most_at_one_time():
    def overlapping() -> None:
        first = torch.empty(100)
        second = torch.empty(50)
        del first
        third = torch.empty(60)
        del second, third

    recording, _ = record_allocations(overlapping)
    assert recording.peak_bytes() == 600


def test_a_region_that_allocates_nothing_has_peak_zero():
    recording, _ = record_allocations(lambda: None)
    assert recording.inside == ()
    assert recording.peak_bytes() == 0


def test_what_happens_around_the_region_is_kept_apart():
    recorder = AllocationRecorder()
    with recorder:
        early = torch.empty(10)
        with recorder.region():
            inside = torch.empty(20)
        late = torch.empty(30)
    assert [a.change_bytes for a in recorder.recording.before] == [40]
    assert [a.change_bytes for a in recorder.recording.inside] == [80]
    assert early.numel() + inside.numel() + late.numel() == 60


def test_empty_tensors_are_no_blocks():
    recording, _ = record_allocations(lambda: torch.empty(0))
    assert recording.inside == ()


def test_deep_nesting_is_read():
    def nested(depth: int) -> None:
        if depth == 0:
            torch.empty(10)
            return
        with record_function("level"):
            nested(depth - 1)

    recording, _ = record_allocations(lambda: nested(300))
    assert [a.change_bytes for a in recording.inside] == [40, -40]


def test_only_one_profiler_can_record():
    with (
        torch.autograd.profiler.profile(use_kineto=True),
        pytest.raises(ProfileError, match="already recording"),
    ):
        record_allocations(lambda: None)


def test_recording_stops_when_the_function_raises():
    def fails() -> None:
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        record_allocations(fails)
    recording, _ = record_allocations(lambda: torch.empty(10))
    assert recording.peak_bytes() == 40


def test_nothing_is_printed_and_the_environment_is_as_before(capfd, monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    record_allocations(lambda: None)
    assert "KINETO_LOG_LEVEL" not in os.environ
    assert capfd.readouterr() == ("", "")
