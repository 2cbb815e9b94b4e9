"""Platforms: devices with their budgets, and the links between them."""

from dataclasses import dataclass

from remat.errors import InvalidPlatformError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that runs ops within its own memory.

    Parameters
    ----------
    name
        For people.
    kind
        The device kind; ops have one cost per kind.
    budget_bytes
        Most bytes that may be live at once, or ``None`` for no limit.
    """

    name: str = "cpu"
    kind: str = "cpu"
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and self.budget_bytes <= 0:
            msg = (
                f"device {self.name!r} has budget_bytes={self.budget_bytes:_}; a budget "
                "must be positive (or None for no limit)"
            )
            raise InvalidPlatformError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-way connection between two devices.

    Parameters
    ----------
    source, target
        Device indices.
    bytes_per_s
        Bandwidth in bytes per second, at least 1.
    latency_ns
        Fixed time of a copy in nanoseconds, at least 0.
    """

    source: int
    target: int
    bytes_per_s: int
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or self.latency_ns < 0:
            msg = (
                f"link {self.source}->{self.target} has bandwidth "
                f"{self.bytes_per_s:_} B/s and latency {self.latency_ns:_} ns; need at "
                "least 1 B/s and 0 ns"
            )
            raise InvalidPlatformError(msg)

    def copy_ns(self, size_bytes: int) -> int:
        """Return the time in nanoseconds to copy ``size_bytes``, rounded up."""
        return self.latency_ns - (-size_bytes * 1_000_000_000 // self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The devices of one training run and the links between them.

    Raises
    ------
    InvalidPlatformError
        If there is no device, a link names an unknown device or joins a device to
        itself, or two links join the same pair in the same direction.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            msg = "a platform needs at least one device"
            raise InvalidPlatformError(msg)
        pairs: set[tuple[int, int]] = set()
        for link in self.links:
            pair = (link.source, link.target)
            if not all(0 <= d < len(self.devices) for d in pair) or pair in pairs:
                msg = f"link {pair} names an unknown device or is given twice"
                raise InvalidPlatformError(msg)
            if link.source == link.target:
                msg = f"link {pair} joins a device to itself"
                raise InvalidPlatformError(msg)
            pairs.add(pair)

    def link(self, source: int, target: int) -> Link | None:
        """Return the link from ``source`` to ``target``, or ``None``."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None


def single_device(budget_bytes: int | None = None, kind: str = "cpu") -> Platform:
    """Return a platform of one device of kind ``kind`` with the given budget."""
    return Platform(devices=(Device(name=kind, kind=kind, budget_bytes=budget_bytes),))
