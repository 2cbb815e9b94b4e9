"""Settings of an allocator, as PYTORCH_ALLOC_CONF writes them."""

import pytest

from remat.core.allocator import AllocatorSettings
from remat.core.errors import InvalidPlatformError


def test_pytorchs_own_example_is_read() -> None:
    # Of c10/test/core/AllocatorConfig_test.cpp.
    settings = AllocatorSettings.parse(
        "max_split_size_mb:40,max_non_split_rounding_mb:30,"
        "garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],"
        "expandable_segments:True,pinned_use_background_threads:True"
    )
    assert settings.max_split_size_mb == 40
    assert settings.max_non_split_rounding_mb == 30
    assert settings.garbage_collection_threshold == 0.5
    assert settings.expandable_segments
    by_mib = dict(
        zip([2**n for n in range(16)], settings.roundup_power2_divisions, strict=True)
    )
    expected = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1}
    assert {mib: by_mib[mib] for mib in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[1:8,2:0,>:2]",
        "max_split_size_mb:128,garbage_collection_threshold:0.8",
        "max_non_split_rounding_mb:64,large_segment_size_mb:12",
    ],
)
def test_settings_are_written_as_they_are_read(text: str) -> None:
    settings = AllocatorSettings.parse(text)
    assert AllocatorSettings.parse(str(settings)) == settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backend:cudaMallocAsync", "not modelled"),
        ("expandable_segments:true", "must be True or False"),
        ("max_split_size_mb:19", "at least 20"),
        ("large_segment_size_mb:13", "must be even"),
        ("garbage_collection_threshold:1.0", "below 1"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[3:1]", "no power of two"),
        ("roundup_power2_divisions:[4]", "pairs"),
        ("max_split_size_mb", "cannot be read"),
        ("max_split_size_mb:x", "max_split_size_mb is 'x'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidPlatformError, match=said):
        AllocatorSettings.parse(text)


def test_the_environment_is_read_as_pytorch_reads_it() -> None:
    old, new = "max_split_size_mb:64", "expandable_segments:True"
    both = {"PYTORCH_CUDA_ALLOC_CONF": old, "PYTORCH_ALLOC_CONF": new}
    assert str(AllocatorSettings.of_environment(both)) == new
    assert (
        str(AllocatorSettings.of_environment({"PYTORCH_CUDA_ALLOC_CONF": old})) == old
    )
    assert AllocatorSettings.of_environment({}) == AllocatorSettings()
