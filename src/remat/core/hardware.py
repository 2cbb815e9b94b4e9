"""Accelerators as their makers describe them: memory, rates, the link to the host."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from remat.core.checks import checked_text, keep_integers
from remat.core.errors import InvalidPlatformError
from remat.core.platform import LARGEST_RATE
from remat.core.units import LARGEST_BUDGET, format_bytes

KINDS = ("cuda", "rocm", "cpu")
"""Whose kernels run on a device."""

TYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
"""Types of numbers that a rate may be for; ``tf32`` is what float32 is rounded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device that steps are planned for, whether or not it is here.

    Parameters
    ----------
    name
        What users call it, such as ``"h100-80gb"``.
    title
        The maker's name.
    kind
        One of :data:`KINDS`.
    memory_bytes
        What the driver leaves to all programs, at least 1.
    context_bytes
        What a process takes of that before its first tensor, at least 0, and what
        libraries keep for matrix products.
    bytes_per_s
        Peak bandwidth of its memory, at least 1.
    link_bytes_per_s
        Peak bandwidth to the host's memory in one direction, at least 1.
    l2_bytes
        The last cache that all processors share, at least 0.
    launch_ns
        Shortest time of an operator, at least 0.
    resident_threads
        How many threads its processors run at once, at least 0.
    flops_per_s
        Type, of :data:`TYPES` -> peak rate of dense matrix products; ``float32`` at
        least.
    percent
        Class of operators -> the share of the peak rate that they reach, 1 to 100:
        ``"matmul"``, ``"convolution"`` and ``"attention"`` of the rate, ``"memory"`` of
        the bandwidth, ``"link"`` of the link.
    sources
        Field, or field and key as in ``"flops_per_s.float32"`` -> where the number is
        from.

    Raises
    ------
    InvalidPlatformError
        If a number is out of range or missing, or has no source.
    """

    name: str
    title: str
    kind: str
    memory_bytes: int
    context_bytes: int
    bytes_per_s: int
    link_bytes_per_s: int
    l2_bytes: int
    launch_ns: int
    resident_threads: int
    flops_per_s: Mapping[str, int]
    percent: Mapping[str, int]
    sources: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        error = InvalidPlatformError
        checked_text("the name of a device", self.name, may_be_empty=False, error=error)
        of = f"device {self.name!r}"
        if self.kind not in KINDS:
            msg = f"kind of {of} is {self.kind!r}; it must be one of {', '.join(KINDS)}"
            raise error(msg)
        most = LARGEST_BUDGET
        keep_integers(self, "memory_bytes", of=of, least=1, most=most, error=error)
        sizes = ("context_bytes", "l2_bytes", "launch_ns", "resident_threads")
        keep_integers(self, *sizes, of=of, least=0, most=most, error=error)
        rates = ("bytes_per_s", "link_bytes_per_s")
        keep_integers(self, *rates, of=of, least=1, most=LARGEST_RATE, error=error)
        self._check_shares(of)
        self._check_sources(of)
        if self.context_bytes >= self.memory_bytes:
            msg = (
                f"the context of {of} takes {format_bytes(self.context_bytes)}, and it has "
                f"{format_bytes(self.memory_bytes)}; nothing is left for a step"
            )
            raise error(msg)

    def _check_shares(self, of: str) -> None:
        unknown = set(self.flops_per_s) - set(TYPES)
        if unknown or "float32" not in self.flops_per_s:
            found = ", ".join(self.flops_per_s)
            msg = (
                f"{of} has rates for {found or 'no type'}; there must be one for float32, "
                f"and may be for {', '.join(TYPES)}"
            )
            raise InvalidPlatformError(msg)
        if set(self.percent) != set(CLASSES):
            found = ", ".join(self.percent)
            msg = f"{of} has percents for {found}; it must have {', '.join(CLASSES)}"
            raise InvalidPlatformError(msg)
        numbers = [*self.flops_per_s.values(), *self.percent.values()]
        if any(type(number) is not int or number < 1 for number in numbers):
            msg = f"a rate or a percent of {of} is no integer of at least 1: {numbers}"
            raise InvalidPlatformError(msg)
        if max(self.percent.values()) > 100:
            msg = f"a percent of {of} is more than 100: {dict(self.percent)}"
            raise InvalidPlatformError(msg)

    def _check_sources(self, of: str) -> None:
        numbers = numbers_of(self.flops_per_s)
        missing = [name for name in numbers if not self.sources.get(name)]
        if missing:
            msg = f"numbers of {of} have no source: {', '.join(missing)}"
            raise InvalidPlatformError(msg)

    @property
    def usable_bytes(self) -> int:
        """What a step may take: the memory without the context."""
        return self.memory_bytes - self.context_bytes

    @property
    def granule_bytes(self) -> int:
        """What its allocator rounds every block up to a multiple of."""
        return 1 if self.kind == "cpu" else 512

    def rate(self, kind: str) -> int:
        """Return the peak rate of matrix products of a type, or that of float32."""
        return self.flops_per_s.get(kind, self.flops_per_s["float32"])


CLASSES = ("matmul", "convolution", "attention", "memory", "link")
"""Classes of operators that reach shares of their own of a peak rate."""

NUMBERS = (
    "memory_bytes",
    "context_bytes",
    "bytes_per_s",
    "link_bytes_per_s",
    "l2_bytes",
    "launch_ns",
    "resident_threads",
)


def numbers_of(types: Iterable[str]) -> list[str]:
    """Return the names of all numbers of a device that has rates for these types."""
    rates = [f"flops_per_s.{kind}" for kind in types]
    return [*NUMBERS, *rates, *(f"percent.{name}" for name in CLASSES)]
