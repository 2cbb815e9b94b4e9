"""Costs that a platform file holds: looked up, and measured for such a file.

The text that describes an operator there is that of the cache on disk without the
devices of its tensors, so that costs measured on one machine are found on another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch

from remat.core.errors import InvalidPlatformError, ProfileError
from remat.core.platform import MeasuredCost, Platform
from remat.profile.arguments import describe, target_name
from remat.profile.cache import CostCache
from remat.profile.operators import OperatorCall, OperatorCost, profile_operators


def portable_text(call: OperatorCall) -> str | None:
    """Return the text for a call on any device; ``None`` if no text says it all."""
    described = describe(call.target, call.args, call.kwargs, hides_devices=True)
    return described.text if described.is_complete else None


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """What a platform says of the costs on one of its devices.

    Parameters
    ----------
    device
        The device's name.
    by_text
        The costs by the text of the operator; empty if the platform has none for it.
    """

    device: str
    by_text: Mapping[str, MeasuredCost]

    @staticmethod
    def of(platform: Platform | None, device: str) -> "KnownCosts":
        """Return what a platform, if there is one, says of the device of that name."""
        return KnownCosts(device, {} if platform is None else platform.costs_on(device))

    def split(
        self, calls: Sequence[OperatorCall]
    ) -> tuple[dict[int, OperatorCost | None], list[int]]:
        """Return what is known by position, and the positions of the other calls.

        What is known to be unable to run on the device is ``None``.

        Raises
        ------
        InvalidPlatformError
            If a known cost has not one size for each output.
        """
        if not self.by_text:
            return {}, list(range(len(calls)))
        found: dict[int, OperatorCost | None] = {}
        others: list[int] = []
        for position, call in enumerate(calls):
            text = portable_text(call)
            known = None if text is None else self.by_text.get(text)
            if known is None:
                others.append(position)
            else:
                found[position] = _operator_cost(known)
        return found, others

    def check_outputs(self, call: OperatorCall, cost: OperatorCost, count: int) -> None:
        """Refuse a cost of another number of outputs than the operator has.

        Raises
        ------
        InvalidPlatformError
            If there are not ``count`` sizes.
        """
        found = len(cost.output_sizes_bytes)
        if found != count:
            msg = (
                f"the platform's cost of operator {target_name(call.target)} on device "
                f"{self.device!r} has {found} output sizes, but it has {count} outputs; "
                "measure it again with remat profile-platform"
            )
            raise InvalidPlatformError(msg)

    def check_sizes(
        self,
        call: OperatorCall,
        cost: OperatorCost,
        values: Sequence[torch.Tensor | None],
    ) -> None:
        """Refuse a cost whose outputs are smaller than their elements.

        They may be larger: some kernels round up, or leave gaps.

        Parameters
        ----------
        call, cost
            An operator, and what is known of it.
        values
            What it returns, as traced.

        Raises
        ------
        InvalidPlatformError
            If the elements of an output do not fit into its size.
        """
        made = [value for value in values if value is not None]
        for value, size_bytes in zip(made, cost.output_sizes_bytes, strict=True):
            needed_bytes = _element_bytes(value)
            if size_bytes < needed_bytes:
                msg = (
                    f"the platform's cost of operator {target_name(call.target)} on device "
                    f"{self.device!r} says that an output takes {size_bytes} bytes, but its "
                    f"elements alone take {needed_bytes}; measure it again with remat "
                    "profile-platform"
                )
                raise InvalidPlatformError(msg)

    def refuse_unable(self, op_name: str) -> NoReturn:
        """Refuse an op that cannot run on the one device that is planned for.

        Raises
        ------
        InvalidPlatformError
            Always.
        """
        msg = (
            f"op {op_name!r} cannot run on {self.device!r}, the one device that is planned "
            "for, as the platform's costs say; give a platform with a device that can"
        )
        raise InvalidPlatformError(msg)

    def refuse_missing(self, calls: Sequence[OperatorCall], place: str | None) -> None:
        """Refuse operators that can neither be looked up nor measured.

        Parameters
        ----------
        calls
            The calls that are not known.
        place
            torch's name of the device, which is not on this machine.

        Raises
        ------
        InvalidPlatformError
            If there is one.
        """
        texts = dict.fromkeys(portable_text(call) or "" for call in calls)
        if not texts:
            return
        first = calls[0]
        where = f" ({place})" if place not in {None, self.device} else ""
        if self.by_text:
            what = (
                f"{len(texts)} of the step's operators have no cost among the "
                f"{len(self.by_text)} that the platform has for it, first {next(iter(texts))}"
            )
            if first.source:
                what += f" from {first.source}"
        else:
            what = "the platform has no costs for it"
        msg = (
            f"device {self.device!r}{where} is not on this machine, and {what}; measure "
            "this model there, with remat profile-platform FACTORY --output FILE, or "
            "describe its kind with flops_per_s and bytes_per_s"
        )
        raise InvalidPlatformError(msg)


def _element_bytes(value: torch.Tensor) -> int:
    """Return the bytes of the elements of a strided tensor that lie apart."""
    if value.layout is not torch.strided:
        return 0
    lengths = [
        n if stride else 1
        for n, stride in zip(value.shape, value.stride(), strict=True)
    ]
    return math.prod(lengths) * value.element_size() if value.numel() else 0


def _operator_cost(known: MeasuredCost) -> OperatorCost | None:
    if known.cost_ns is None:
        return None
    return OperatorCost(
        cost_ns=known.cost_ns,
        workspace_bytes=known.workspace_bytes,
        output_bytes=sum(known.output_sizes_bytes),
        output_sizes_bytes=known.output_sizes_bytes,
        aliases_input=known.aliases_input,
        samples=known.samples,
        spread_ns=known.spread_ns,
    )


def is_here(place: str) -> bool:
    """Return whether this machine has the device that torch calls ``place``."""
    try:
        torch.empty(0, device=place)
    # What torch raises for a device that it was not built for, or that is not there.
    except (AssertionError, RuntimeError, NotImplementedError):
        return False
    return True


def measured_costs(
    calls: Sequence[OperatorCall],
    moved: Sequence[OperatorCall],
    device: str,
    *,
    is_home: bool,
    cache: CostCache | None,
    on_progress: Callable[[str, float], None],
) -> list[MeasuredCost]:
    """Measure the distinct operators of a step on one device.

    Parameters
    ----------
    calls
        The calls as they were traced, at home.
    moved
        The same calls on the device.
    device
        The device's name.
    is_home
        Whether every operator must run there: it can anywhere else fail.
    cache
        Where measurements are looked up and kept; ``None`` for neither.
    on_progress
        Called with the operator in turn and the share that is done.

    Raises
    ------
    ProfileError
        If an operator cannot run alone at home.
    """
    distinct: dict[str, OperatorCall] = {}
    for call, on_device in zip(calls, moved, strict=True):
        text = portable_text(call)
        if text is not None:
            distinct.setdefault(text, on_device)
    if is_home:
        found: list[OperatorCost | None] = [
            *profile_operators(
                list(distinct.values()), cache=cache, on_progress=on_progress
            )
        ]
    else:
        found = []
        for position, call in enumerate(distinct.values()):
            label = f"measuring {target_name(call.target)} on {device}"
            on_progress(label, position / len(distinct))
            try:
                found += profile_operators([call], cache=cache)
            except ProfileError:
                # That it cannot run there is what the file then says.
                found.append(None)
    return [
        _measured_cost(device, text, cost)
        for text, cost in zip(distinct, found, strict=True)
    ]


def _measured_cost(device: str, text: str, cost: OperatorCost | None) -> MeasuredCost:
    if cost is None:
        return MeasuredCost(device=device, operator=text, cost_ns=None)
    fields = asdict(cost)
    del fields["output_bytes"]  # The sum of those of each output.
    return MeasuredCost(device=device, operator=text, **fields)
