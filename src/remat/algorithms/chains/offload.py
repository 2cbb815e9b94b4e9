"""Rematerialisation and offloading on a chain of stages, with overlap.

A stored value may stay on the device, be recomputed, or go to the host while the device
computes and come back in time. :func:`plan_offload` plans with Rotor for a *virtual*
budget between the real one and everything, lets :mod:`remat.search.schedule_paging`
bring each plan within the real budget, and returns the quickest: more virtual memory
means less recomputation and more copies.

What it is: a search over one parameter, each point an exact program (Rotor) and an
exact timing, after the model of PoFo [1]_; not that paper's dynamic program, whose
states are transfers in flight. Without a link it is Rotor; with links of unlimited
speed it has no overhead wherever each operation fits on its own: every stage runs the
quickest of its options that do.

References
----------
.. [1] O. Beaumont, L. Eyraud-Dubois, A. Shilova. Efficient combination of
   rematerialization and offloading for training DNNs. NeurIPS 2021.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from remat.algorithms.chains.conventions import checked_budget
from remat.algorithms.chains.operations import Backward, Forward, Operation
from remat.algorithms.chains.rotor import DEFAULT_SLOTS, ChainPlan, plan_rotor
from remat.algorithms.chains.stage_graph import StageGraph
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.best import Best
from remat.core.checks import checked_integer, checked_record
from remat.core.errors import InvalidGraphError
from remat.core.graph import TrainingGraph
from remat.search.schedule_paging import HostLink, PagedSchedule, page

DEFAULT_CANDIDATES = 24
"""Virtual budgets that are tried."""

MOST_CANDIDATES = 10_000
"""Most virtual budgets."""


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """A schedule of a chain that recomputes and offloads.

    Parameters
    ----------
    time_ns
        Time with copies overlapping computations.
    virtual_bytes
        Budget that the recomputation was planned for.
    rotor
        That plan; its ``cost_ns`` is the time of all computations.
    graph, paged
        Its training graph, and the schedule with copies.
    """

    time_ns: int
    virtual_bytes: int
    rotor: ChainPlan
    graph: TrainingGraph
    paged: PagedSchedule


def plan_offload(
    chain: StageChain,
    budget_bytes: int,
    link: HostLink,
    *,
    slots: int = DEFAULT_SLOTS,
    candidates: int = DEFAULT_CANDIDATES,
) -> OffloadPlan | None:
    """Return the quickest plan found that keeps, recomputes or offloads.

    Parameters
    ----------
    chain
        The chain.
    budget_bytes
        Most bytes live on the device at any time; at least 0.
    link
        Speeds of copies to the host and back; the host is not limited.
    slots
        Slots of :func:`~remat.algorithms.chains.rotor.plan_rotor`.
    candidates
        Virtual budgets to try besides the real one, 1 to :data:`MOST_CANDIDATES`.

    Returns
    -------
    OffloadPlan or None
        The quickest; of equals, the one that copies least. ``None`` if none fits.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, or out of range.
    SolverUnsuitableError
        If the tables of Rotor would be too large.

    Notes
    -----
    For L stages, S slots and C candidates: time O(C S L^3 K^2) of Rotor with K options
    a stage, and O(C L^2) of paging.

    References
    ----------
    O. Beaumont, L. Eyraud-Dubois, A. Shilova. Efficient combination of
    rematerialization and offloading for training DNNs. NeurIPS 2021 (the model; the
    search is another, as the module says).

    Examples
    --------
    >>> chain = StageChain.of_lists(
    ...     forward_ns=[10] * 8,
    ...     backward_ns=[20] * 8,
    ...     output_bytes=[4] * 8,
    ...     saved_bytes=[4] * 8,
    ... )
    >>> fast = HostLink(out_bytes_per_s=10**12, in_bytes_per_s=10**12)
    >>> slow = HostLink(out_bytes_per_s=1, in_bytes_per_s=1)
    >>> plan_offload(chain, 28, fast).time_ns, plan_offload(chain, 28, slow).time_ns
    (240, 330)
    """
    checked_record("chain", chain, StageChain, error=InvalidGraphError)
    checked_record("link", link, HostLink, error=InvalidGraphError)
    budget_bytes = checked_budget(budget_bytes)
    candidates = checked_integer(
        "candidates",
        candidates,
        least=1,
        most=MOST_CANDIDATES,
        error=InvalidGraphError,
    )
    ways = [
        _options_within(chain, index, budget_bytes)
        for index, _ in enumerate(chain.stages)
    ]
    if not all(ways):
        return None
    able = replace(
        chain,
        stages=tuple(
            _with_options(stage, numbers)
            for stage, numbers in zip(chain.stages, ways, strict=True)
        ),
    )
    most = max(2 * sum(able.all_sizes), budget_bytes)
    budgets = [budget_bytes]
    if link.is_usable:
        budgets += [
            budget_bytes + (most - budget_bytes) * index * index // candidates**2
            for index in range(1, candidates + 1)
        ]
    best = Best[OffloadPlan]()
    seen: set[tuple[object, ...]] = set()
    for virtual in dict.fromkeys(budgets):
        rotor = plan_rotor(able, virtual, slots=slots)
        if rotor is None or rotor.operations in seen:
            continue
        seen.add(rotor.operations)
        rotor = replace(rotor, operations=_renamed(rotor.operations, ways))
        form = StageGraph(chain, rotor.operations)
        paged = page(form.graph, form.schedule, budget_bytes, link)
        if paged is None:
            continue
        plan = OffloadPlan(
            time_ns=paged.time_ns,
            virtual_bytes=virtual,
            rotor=rotor,
            graph=form.graph,
            paged=paged,
        )
        best.offer(plan, paged.time_ns, paged.paged_bytes)
    return best.answer


def _options_within(chain: StageChain, index: int, budget_bytes: int) -> list[int]:
    """Return the options of a stage that a budget allows, those that hold least first.

    What Rotor plans for more memory is of no use if an operation alone is too large;
    and of equally quick options it takes the first.
    """
    values, gradients = chain.value_bytes, chain.gradient_bytes
    stage = chain.stages[index]

    def held(option: StageOption) -> int:
        output = values[index + 1] if option.needs_output else 0
        return option.saved_bytes + output

    def forward(option: StageOption) -> int:
        inside = option.saved_bytes + option.forward_workspace_bytes
        most = max(stage.forward_workspace_bytes, inside)
        return values[index] + values[index + 1] + most

    def backward(option: StageOption) -> int:
        around = values[index] + gradients[index] + gradients[index + 1]
        return around + held(option) + option.backward_workspace_bytes

    needs = {
        number: max(forward(option), backward(option))
        for number, option in enumerate(stage.options)
    }
    able = [number for number, need in needs.items() if need <= budget_bytes]
    return sorted(able, key=lambda n: (held(stage.options[n]), needs[n]))


def _with_options(stage: Stage, numbers: Iterable[int]) -> Stage:
    return replace(stage, options=tuple(stage.options[number] for number in numbers))


def _renamed(
    operations: Iterable[Operation], ways: list[list[int]]
) -> tuple[Operation, ...]:
    """Return operations with the numbers that options have in the chain as given."""
    return tuple(
        replace(operation, option=ways[operation.stage][operation.option])
        if isinstance(operation, Forward | Backward) and operation.option is not None
        else operation
        for operation in operations
    )
