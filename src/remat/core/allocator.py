"""Settings of a caching allocator, in the words of ``PYTORCH_ALLOC_CONF``."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat.core.checks import checked_text, keep_flags, keep_integers, shown
from remat.core.errors import InvalidPlatformError

MIB = 2**20
INTERVALS = 16
"""How many sizes have divisions of their own: 1 MiB, 2 MiB, up to 32 GiB and more."""

ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where PyTorch reads the settings, the first that is set."""

_ELSEWHERE = re.compile(
    r"pinned_\w+|release_lock_on_\w+|graph_capture_record_stream_reuse|use_\w+_host_register"
)
"""Options that change nothing about which bytes of the device are reserved."""

_LARGEST_MIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How PyTorch's caching allocator of an accelerator is set.

    The names and defaults are PyTorch's (``c10/core/AllocatorConfig.h``).

    Parameters
    ----------
    expandable_segments
        Whether a pool grows one segment, page by page.
    max_split_size_mb
        Blocks from this many MiB on are not split; ``None`` for no limit, else at least
        ``large_segment_size_mb``.
    max_non_split_rounding_mb
        How much larger than a request, in MiB, a block may be that is not split.
    garbage_collection_threshold
        Share, above 0 and below 1, of the memory that the process may take from which
        on unused blocks are given back; 0 for never. Without a limit on the process's
        memory it does nothing.
    roundup_power2_divisions
        For sizes from 1 MiB, 2 MiB, 4 MiB ... on, into how many parts the distance to
        the next power of two is divided; sizes are rounded up to such a part. Powers of
        two, or 0 for rounding to 512 bytes; 16 of them.
    large_segment_size_mb
        MiB of the segments for requests of 1 to 10 MiB, and of the pages of expandable
        segments; 12 to 1024, even.

    Raises
    ------
    InvalidPlatformError
        If a number is out of range.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = 20
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    large_segment_size_mb: int = 20

    def __post_init__(self) -> None:
        error, of = InvalidPlatformError, "the allocator"
        keep_flags(self, "expandable_segments", of=of, error=error)
        most = _LARGEST_MIB
        keep_integers(
            self, "large_segment_size_mb", of=of, least=12, most=1024, error=error
        )
        least = self.large_segment_size_mb
        keep_integers(
            self,
            "max_split_size_mb",
            of=of,
            least=least,
            most=most,
            optional=True,
            error=error,
        )
        keep_integers(
            self,
            "max_non_split_rounding_mb",
            of=of,
            least=least,
            most=most,
            error=error,
        )
        share = self.garbage_collection_threshold
        if not 0.0 <= share < 1.0 or math.isnan(share):
            msg = (
                f"garbage_collection_threshold of {of} is {shown(share)}; it must be "
                "above 0 and below 1, or 0 for none"
            )
            raise InvalidPlatformError(msg)
        divisions = self.roundup_power2_divisions
        if len(divisions) != INTERVALS or any(
            number < 0 or number > most or number & (number - 1) for number in divisions
        ):
            msg = (
                f"roundup_power2_divisions of {of} is {shown(divisions)}; it must be "
                f"{INTERVALS} powers of two, or 0"
            )
            raise InvalidPlatformError(msg)
        if self.large_segment_size_mb % 2:
            msg = (
                f"large_segment_size_mb of {of} is {self.large_segment_size_mb}; it must "
                "be even"
            )
            raise InvalidPlatformError(msg)

    @staticmethod
    def parse(text: str) -> "AllocatorSettings":
        """Return the settings that a text such as ``PYTORCH_ALLOC_CONF`` holds gives.

        Parameters
        ----------
        text
            ``option:value`` pairs with commas between; empty for the defaults. Options
            for pinned memory and locks are passed over.

        Raises
        ------
        InvalidPlatformError
            If an option is unknown, not modelled, or its value is none.

        Examples
        --------
        >>> AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
        >>> print(AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,>:4]"))
        roundup_power2_divisions:[1:1,2:1,4:1,8:1,16:1,32:1,64:1,128:1,256:1,512:2,>:4]
        """
        checked_text("the allocator's settings", text, error=InvalidPlatformError)
        given: dict[str, Any] = {}
        rest = "".join(text.split())
        while rest:
            matched = re.match(r"([^:,\[\]]+):(\[[^\]]*\]|[^,\[\]]+)(?:,|$)", rest)
            if matched is None:
                msg = (
                    f"the allocator's settings are {text!r}, which cannot be read from "
                    f"{rest!r} on; write option:value,option:value"
                )
                raise InvalidPlatformError(msg)
            option, value = matched.groups()
            rest = rest[matched.end() :]
            if _ELSEWHERE.fullmatch(option) or (option, value) == ("backend", "native"):
                continue
            reader = _READERS.get(option)
            if reader is None:
                msg = (
                    f"the allocator's settings {text!r} have {option}:{value}, which is "
                    f"not modelled; known are {', '.join(_READERS)}"
                )
                raise InvalidPlatformError(msg)
            try:
                given[option] = reader(value)
            except ValueError as error:
                msg = f"the allocator's setting {option} is {value!r}: {error}"
                raise InvalidPlatformError(msg) from error
        return AllocatorSettings(**given)

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> "AllocatorSettings":
        """Return the settings that PyTorch takes from these environment variables.

        Raises
        ------
        InvalidPlatformError
            As :meth:`parse`.
        """
        for name in ENVIRONMENT:
            if environment.get(name):
                return AllocatorSettings.parse(environment[name])
        return AllocatorSettings()

    def __str__(self) -> str:
        """Return the text that gives these settings; empty for the defaults."""
        default = AllocatorSettings()
        parts = [
            f"{name}:{getattr(self, name)}"
            for name in _READERS
            if name != "roundup_power2_divisions"
            and getattr(self, name) != getattr(default, name)
        ]
        if any(self.roundup_power2_divisions):
            parts.append(f"roundup_power2_divisions:{self._divisions_text()}")
        return ",".join(parts)

    def _divisions_text(self) -> str:
        divisions = self.roundup_power2_divisions
        last = divisions[-1]
        same = INTERVALS
        while same > 0 and divisions[same - 1] == last:
            same -= 1
        if same == 0:
            return str(last)
        pairs = [f"{2**index}:{divisions[index]}" for index in range(same)]
        return f"[{','.join(pairs)},>:{last}]"


def _flag(value: str) -> bool:
    if value not in {"True", "False"}:
        msg = "it must be True or False"
        raise ValueError(msg)
    return value == "True"


def _divisions(value: str) -> tuple[int, ...]:
    """Return what ``[256:1,512:2,>:4]``, or one number, says of each interval.

    As ``parseRoundUpPower2Divisions``: the first pair counts for what is smaller, too.
    """
    if not value.startswith("["):
        return (int(value),) * INTERVALS
    divisions = [0] * INTERVALS
    last = 0
    for position, pair in enumerate(value[1:-1].split(",")):
        size, colon, number = pair.partition(":")
        if not colon:
            msg = "it must be a number, or pairs of MiB and number in brackets"
            raise ValueError(msg)
        if size == ">":
            divisions[last:] = [int(number)] * (INTERVALS - last)
            continue
        mib = int(size)
        if mib < 1 or mib & (mib - 1):
            msg = f"{size} is no power of two"
            raise ValueError(msg)
        index = min(mib.bit_length() - 1, INTERVALS - 1)
        if position == 0:
            divisions[:index] = [int(number)] * index
        divisions[index] = int(number)
        last = index + 1
    return tuple(divisions)


_READERS: dict[str, Any] = {
    "expandable_segments": _flag,
    "max_split_size_mb": int,
    "max_non_split_rounding_mb": int,
    "garbage_collection_threshold": float,
    "roundup_power2_divisions": _divisions,
    "large_segment_size_mb": int,
}
