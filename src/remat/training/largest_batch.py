"""The largest batch, or the longest one, whose step fits a budget."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from remat.core.checks import checked_callable, checked_integer
from remat.core.errors import BudgetError, UnitError
from remat.core.units import is_percentage, parse_budget
from remat.files.hardware import chosen_hardware
from remat.planning.batch_sizes import BatchSizes, SizeSearch, TriedSize
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.torch_compat.names import tree_leaves
from remat.training.fitting import plan
from remat.training.request import PlanOptions, shows_options

_MOST_EQUAL = 8
"""How many sizes in a row, each at least twice the one before, may have the same shapes
before it is taken that larger ones have, too."""


@shows_options(after="most")
def max_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget: Budget | None = None,
    least: int = 1,
    most: int | None = None,
    multiple_of: int = 1,
    **options: Unpack[PlanOptions],
) -> BatchSizes:
    """Return the largest size of a batch whose step is planned within a budget.

    Sizes are planned, not run, as by :func:`remat.plan`. What the next one is, follows
    from the smallest budget that is known for one that was too large.

    Parameters
    ----------
    model
        As for :func:`remat.plan`; it may be on the ``meta`` device.
    make_batch
        Returns the example for a size: a tensor, a tuple of arguments, or a mapping of
        keyword arguments. What the size means is up to it: samples, tokens, pixels.
    budget
        Bytes, or a size such as ``"8 GiB"``; with ``device=`` by default what that
        device leaves to a step.
    least, most
        The smallest size, and the largest one that is of use, at least 1; without
        ``most`` sizes are doubled until one does not fit.
    multiple_of
        Sizes that are tried are ``least`` and multiples of this.
    **options
        As for :func:`remat.plan`. A ``loss`` must make its targets from the outputs.

    Returns
    -------
    BatchSizes
        The sizes that were tried, with a plan of each that fits. ``print`` shows them
        as a table, :func:`remat.report.figures.batch_curve` draws them.

    Raises
    ------
    BudgetError
        If not even the smallest size fits; it names the smallest known budget of it.
    UnitError
        If the budget is a percentage, which would be another number for each size.
    ValueError, TypeError
        If a number is out of range, or ``make_batch`` cannot be called, or without
        ``most`` returns the same shapes however large the size is.

    Notes
    -----
    Plans about log2(sizes) sizes, each of which is traced. That the next larger size
    does not fit is what was tried last; of larger ones it is taken for granted.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.Tanh()] * 4)
    >>> found = max_batch(
    ...     model,
    ...     lambda size: torch.zeros(size, 64),
    ...     budget="1 MiB",
    ...     costs="estimated",
    ... )
    >>> found.size > 100
    True
    """
    checked_callable("make_batch", make_batch)
    device = options.get("device")
    if budget is None and device is not None:
        budget = chosen_hardware(device).usable_bytes
    if budget is None or isinstance(budget, Mapping) or is_percentage(budget):
        msg = (
            f"the budget is {budget!r}; the largest batch is looked for within a number "
            "of bytes of one device, such as budget='8 GiB'"
        )
        raise UnitError(msg)
    least = checked_integer("least", least, least=1)
    multiple_of = checked_integer("multiple_of", multiple_of, least=1)
    if most is not None:
        most = checked_integer("most", most, least=least)

    budget_bytes = parse_budget(budget)

    equal_sizes: list[int] = []
    shapes: list[list[int]] = []

    def planned(size: int) -> Plan:
        example = make_batch(size)
        before, shapes[:] = shapes[:], _shapes(example)
        if shapes != before or not equal_sizes or size < 2 * equal_sizes[-1]:
            equal_sizes.clear()
        equal_sizes.append(size)
        if most is None and len(equal_sizes) == _MOST_EQUAL:
            msg = (
                f"make_batch returns shapes {shapes} for {equal_sizes[0]} and for {size}: "
                "they do not grow with the size, as a slice of a data set ends where that "
                "does. Give most=, the largest size that it can make"
            )
            raise ValueError(msg)
        args, kwargs = _example(example)
        return plan(model, args, kwargs, budget=budget_bytes, **options)

    def tried(size: int) -> TriedSize:
        try:
            found = planned(size)
        except BudgetError as error:
            return TriedSize(size=size, needed_bytes=error.required_bytes)
        return TriedSize(size=size, needed_bytes=found.peak_bytes, plan=found)

    first = planned(least)
    storages = first.graph.storages
    search = SizeSearch(
        TriedSize(size=least, needed_bytes=first.peak_bytes, plan=first),
        budget_bytes=budget_bytes,
        resident_bytes=sum(s.size_bytes for s in storages if s.is_resident),
        most=most,
        multiple_of=multiple_of,
    )
    found = [search.fits, *(search.take(tried(size)) for size in search.sizes())]
    found.sort(key=lambda each: each.size)
    return BatchSizes(budget_bytes=budget_bytes, tried=tuple(found))


def _shapes(batch: Any) -> list[list[int]]:
    leaves = tree_leaves(batch)
    return [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _example(batch: Any) -> tuple[Any, Mapping[str, Any] | None]:
    return ((), batch) if isinstance(batch, Mapping) else (batch, None)
