"""Platforms: devices with their budgets, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remat.core.allocator import AllocatorSettings
from remat.core.checks import (
    checked_integer,
    checked_record,
    checked_records,
    checked_text,
    keep_flags,
    keep_integer_lists,
    keep_integers,
    keep_records,
)
from remat.core.errors import InvalidPlatformError
from remat.core.units import LARGEST_BUDGET, LARGEST_TOTAL, keep_amounts

LARGEST_RATE = 10**30
"""Most bytes, or operations, per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Where the devices of a kind are, and how long ops take on them.

    Parameters
    ----------
    name
        What :attr:`Device.kind` says.
    runs_on
        torch's name of the device type whose memory and kernels it uses (``"cpu"``,
        ``"cuda"``), or of one such device (``"cuda:1"``); ``None`` for a device that
        this machine does not have, which can be planned for and not be run on.
    computes
        Whether it runs ops at all; host memory, for example, only stores.
    time_percent
        Time of an op in percent of its time on ``runs_on``, at least 1: a model of a
        device that is slower or faster than the one at hand.
    flops_per_s, bytes_per_s, launch_ns
        Rates of an analytic estimate (see :mod:`remat.profile.estimate`) that takes the
        place of measured times; both rates are given, at least 1, or neither. The
        launch is in nanoseconds, at least 0.

    Raises
    ------
    InvalidPlatformError
        If a number is out of range, or a kind that computes has neither a place to run
        nor rates.
    """

    name: str
    runs_on: str | None = None
    computes: bool = True
    time_percent: int = 100
    flops_per_s: int | None = None
    bytes_per_s: int | None = None
    launch_ns: int = 0

    def __post_init__(self) -> None:
        error, label = InvalidPlatformError, "the name of a device kind"
        checked_text(label, self.name, may_be_empty=False, error=error)
        of = f"device kind {self.name!r}"
        if self.runs_on is not None:
            checked_text(f"runs_on of {of}", self.runs_on, error=error)
        keep_flags(self, "computes", of=of, error=error)
        most = LARGEST_RATE
        for rate in ("flops_per_s", "bytes_per_s"):
            keep_integers(
                self, rate, of=of, least=1, most=most, optional=True, error=error
            )
        most = LARGEST_TOTAL
        keep_integers(self, "time_percent", of=of, least=1, most=most, error=error)
        keep_amounts(self, "launch_ns", of=of, error=error)
        rates = (self.flops_per_s, self.bytes_per_s)
        if (rates[0] is None) is not (rates[1] is None):
            msg = (
                f"device kind {self.name!r} has one rate of two: flops_per_s={rates[0]}, "
                f"bytes_per_s={rates[1]}; give both, or none"
            )
            raise InvalidPlatformError(msg)
        if self.computes and self.runs_on is None and not self.has_rates:
            msg = (
                f"device kind {self.name!r} runs on no device of this machine and has no "
                "rates, so nothing says how long ops take there; give runs_on, or "
                "flops_per_s and bytes_per_s, or computes=False"
            )
            raise InvalidPlatformError(msg)

    @property
    def has_rates(self) -> bool:
        """Whether times come from rates and not from measurements."""
        return self.flops_per_s is not None


COMMON_KINDS = {
    "cpu": DeviceKind(name="cpu", runs_on="cpu"),
    "cuda": DeviceKind(name="cuda", runs_on="cuda"),
    "host": DeviceKind(name="host", runs_on="cpu", computes=False),
}
"""What a kind is where the platform does not describe it: ``host`` only stores."""


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

    Raises
    ------
    InvalidPlatformError
        If the budget is no integer, not positive, or more than
        :data:`~remat.core.units.LARGEST_BUDGET`; or a name is no text.
    """

    name: str = "cpu"
    kind: str = "cpu"
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        error, label = InvalidPlatformError, "the name of a device"
        checked_text(label, self.name, may_be_empty=False, error=error)
        of = f"device {self.name!r}"
        checked_text(f"kind of {of}", self.kind, error=error)
        keep_integers(
            self,
            "budget_bytes",
            of=of,
            least=1,
            most=LARGEST_BUDGET,
            optional=True,
            error=error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAllocator:
    """That a device's memory has a caching allocator, and how it is set.

    Parameters
    ----------
    device
        The device's name.
    settings
        As ``PYTORCH_ALLOC_CONF`` gives them.

    Raises
    ------
    InvalidPlatformError
        If the name is no text, or the settings are none.
    """

    device: str
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)

    def __post_init__(self) -> None:
        error = InvalidPlatformError
        checked_text("the device of an allocator", self.device, error=error)
        label = f"the settings of the allocator of {self.device!r}"
        checked_record(label, self.settings, AllocatorSettings, error=error)


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
        Fixed time of a copy in nanoseconds, 0 to
        :data:`~remat.core.units.LARGEST_TOTAL`.

    Raises
    ------
    InvalidPlatformError
        If a number is no integer, or out of range.
    """

    source: int
    target: int
    bytes_per_s: int
    latency_ns: int = 0

    def __post_init__(self) -> None:
        error = InvalidPlatformError
        keep_integers(self, "source", "target", of="a link", error=error)
        of = f"link {self.source}->{self.target}"
        keep_integers(
            self, "bytes_per_s", of=of, least=1, most=LARGEST_RATE, error=error
        )
        keep_amounts(self, "latency_ns", of=of, error=error)

    def copy_ns(self, size_bytes: int) -> int:
        """Return the time in nanoseconds to copy ``size_bytes``, rounded up.

        Raises
        ------
        InvalidPlatformError
            If the size is no integer of at least 0.
        """
        if type(size_bytes) is not int or size_bytes < 0:
            size_bytes = checked_integer(
                "size_bytes of a copy", size_bytes, least=0, error=InvalidPlatformError
            )
        return self.latency_ns - (-size_bytes * 1_000_000_000 // self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """What one run of an operator was measured to cost on a device.

    Parameters
    ----------
    device
        Its name.
    operator
        Text of the operator and all its arguments, devices left out.
    cost_ns
        Time in nanoseconds, at least 0, before a kind's ``time_percent``; ``None`` for
        an operator that cannot run there.
    workspace_bytes
        Most bytes in use during the run beyond inputs and outputs, at least 0.
    output_sizes_bytes
        Bytes held by each output in order, each at least 0; 0 for one that shares the
        storage of an input or an earlier output.
    aliases_input
        Whether an output shares the storage of an input.
    samples, spread_ns
        How many runs were timed, and their median distance from the median.

    Raises
    ------
    InvalidPlatformError
        If a number is no integer, negative, or too large to be counted.
    """

    device: str
    operator: str
    cost_ns: int | None
    workspace_bytes: int = 0
    output_sizes_bytes: tuple[int, ...] = ()
    aliases_input: bool = False
    samples: int = 0
    spread_ns: int = 0

    def __post_init__(self) -> None:
        error = InvalidPlatformError
        checked_text("the device of a measured cost", self.device, error=error)
        checked_text("the operator of a measured cost", self.operator, error=error)
        of = f"the cost of {self.operator} on device {self.device!r}"
        keep_amounts(self, "cost_ns", of=of, optional=True, error=error)
        numbers = ("workspace_bytes", "samples", "spread_ns")
        keep_amounts(self, *numbers, of=of, error=error)
        most = LARGEST_TOTAL
        keep_integer_lists(
            self, "output_sizes_bytes", of=of, least=0, most=most, error=error
        )
        keep_flags(self, "aliases_input", of=of, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Costs of operators on devices, and what they were measured with.

    Parameters
    ----------
    environment
        Versions, processor and the like, for people, as pairs of name and value.
    operators
        Each operator at most once for each device.

    Raises
    ------
    InvalidPlatformError
        If an operator is there twice for one device.
    """

    environment: tuple[tuple[str, str], ...] = ()
    operators: tuple[MeasuredCost, ...] = ()

    def __post_init__(self) -> None:
        checked_records(
            "operators", self.operators, MeasuredCost, error=InvalidPlatformError
        )
        seen: set[tuple[str, str]] = set()
        for cost in self.operators:
            key = (cost.device, cost.operator)
            if key in seen:
                msg = (
                    f"operator {cost.operator} has two costs on device {cost.device!r}"
                )
                raise InvalidPlatformError(msg)
            seen.add(key)

    def __repr__(self) -> str:
        return f"<MeasuredCosts of {len(self.operators)} operators>"

    def on(self, device: str) -> dict[str, MeasuredCost]:
        """Return the costs on the device called ``device``, by operator."""
        return {c.operator: c for c in self.operators if c.device == device}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The devices of one training run and the links between them.

    Parameters
    ----------
    devices, links
        The machine; indices of devices are positions in ``devices``.
    kinds
        What the devices' kinds are, where that is not one of :data:`COMMON_KINDS`.
    copies_wait
        Whether a copy waits for all that was issued before it on both its devices, and
        a device, before it goes on, for the copies that fill or read what it discards:
        then no device ever holds more than in serial execution. It is how the runtime
        copies. Otherwise copies run ahead as far as links and data allow.
    costs
        Measured costs of operators, which take the place of measuring them when a model
        is planned; ``None`` if there are none.
    allocators
        The devices whose memory has a caching allocator, which reserves more than is
        live.

    Raises
    ------
    InvalidPlatformError
        If there is no device, a link names an unknown device or joins a device to
        itself, two links join the same pair in the same direction, a kind is described
        twice, a cost or an allocator is for no device, or a device has two allocators.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    kinds: tuple[DeviceKind, ...] = ()
    copies_wait: bool = False
    costs: MeasuredCosts | None = None
    allocators: tuple[DeviceAllocator, ...] = ()

    def __post_init__(self) -> None:
        error = InvalidPlatformError
        of = "a platform"
        keep_records(self, Device, "devices", of=of, error=error)
        keep_records(self, Link, "links", of=of, error=error)
        keep_records(self, DeviceKind, "kinds", of=of, error=error)
        keep_records(self, DeviceAllocator, "allocators", of=of, error=error)
        keep_flags(self, "copies_wait", of=of, error=error)
        if self.costs is not None:
            checked_record(f"costs of {of}", self.costs, MeasuredCosts, error=error)
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
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            msg = f"a device kind is described twice: {', '.join(names)}"
            raise InvalidPlatformError(msg)
        costs = () if self.costs is None else self.costs.operators
        for name in dict.fromkeys(cost.device for cost in costs):
            self.index_of(name)
        cached = [allocator.device for allocator in self.allocators]
        for name in cached:
            self.index_of(name)
        if len(set(cached)) != len(cached):
            msg = f"a device has two allocators: {', '.join(cached)}"
            raise InvalidPlatformError(msg)

    def allocator_of(self, device: int) -> AllocatorSettings | None:
        """Return how the allocator of the device of that index is set.

        ``None`` for a device whose memory has no caching allocator.
        """
        for allocator in self.allocators:
            if allocator.device == self.devices[device].name:
                return allocator.settings
        return None

    def costs_on(self, device: str) -> dict[str, MeasuredCost]:
        """Return the measured costs on the device called ``device``, by operator."""
        return {} if self.costs is None else self.costs.on(device)

    @property
    def names(self) -> tuple[str, ...]:
        """The devices' names, in order."""
        return tuple(device.name for device in self.devices)

    def index_of(self, name: str) -> int:
        """Return the index of the device called ``name``.

        Raises
        ------
        InvalidPlatformError
            If no device, or more than one, has that name.
        """
        if self.names.count(name) != 1:
            count = self.names.count(name)
            msg = (
                f"{count or 'no'} device{'s' * (count > 1)} of the platform "
                f"{'are' if count > 1 else 'is'} called {name!r}; its devices are "
                f"{', '.join(self.names)}"
            )
            raise InvalidPlatformError(msg)
        return self.names.index(name)

    def kind_of(self, device: int) -> DeviceKind:
        """Return what kind of device the device of that index is.

        Raises
        ------
        InvalidPlatformError
            If the kind is neither described nor common.
        """
        name = self.devices[device].kind
        for kind in self.kinds:
            if kind.name == name:
                return kind
        if name in COMMON_KINDS:
            return COMMON_KINDS[name]
        msg = (
            f"device {self.devices[device].name!r} is of kind {name!r}, which the platform "
            f"does not describe; known without a description are {', '.join(COMMON_KINDS)}"
        )
        raise InvalidPlatformError(msg)

    def with_budgets(self, budgets_bytes: Mapping[str, int | None]) -> "Platform":
        """Return the platform with other budgets, given by the devices' names.

        Devices that are not named keep theirs.

        Raises
        ------
        InvalidPlatformError
            If a name is unknown, or a budget is not positive.
        """
        for name in budgets_bytes:
            self.index_of(name)
        return replace(
            self,
            devices=tuple(
                replace(
                    device,
                    budget_bytes=budgets_bytes.get(device.name, device.budget_bytes),
                )
                for device in self.devices
            ),
        )

    def link(self, source: int, target: int) -> Link | None:
        """Return the link from ``source`` to ``target``, or ``None``."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None


def single_device(
    budget_bytes: int | None = None,
    kind: str = "cpu",
    allocator: AllocatorSettings | None = None,
) -> Platform:
    """Return a platform of one device of kind ``kind`` with the given budget.

    With ``allocator`` its memory has a caching allocator that is set so.

    Raises
    ------
    InvalidPlatformError
        As for :class:`Device`.
    """
    cached = (
        () if allocator is None else (DeviceAllocator(device=kind, settings=allocator),)
    )
    return Platform(
        devices=(Device(name=kind, kind=kind, budget_bytes=budget_bytes),),
        allocators=cached,
    )
