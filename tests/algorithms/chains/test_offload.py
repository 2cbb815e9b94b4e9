"""Offloading: limits, the judge on serial and on overlapped time, bad input."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chain_strategies import stage_chains

from remat.algorithms.chains.offload import OffloadPlan, plan_offload
from remat.algorithms.chains.rotor import plan_rotor
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.errors import InvalidGraphError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import Device, Link, Platform
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import simulate
from remat.search.schedule_paging import HostLink, page

GIGA = 10**9
EARLIER, LATER = 10**6, 10**7
NO_LINK = HostLink(out_bytes_per_s=0, in_bytes_per_s=0)
speeds = st.builds(
    HostLink,
    out_bytes_per_s=st.sampled_from([GIGA // 4, GIGA, 3 * GIGA]),
    in_bytes_per_s=st.sampled_from([GIGA // 4, GIGA, 3 * GIGA]),
)


def links(link: HostLink) -> tuple[Link, Link]:
    return (
        Link(source=0, target=1, bytes_per_s=link.out_bytes_per_s),
        Link(source=1, target=0, bytes_per_s=link.in_bytes_per_s),
    )


def judge_serially(plan: OffloadPlan, budget: int, link: HostLink) -> None:
    platform = Platform(devices=(Device(), Device(name="host")), links=links(link))
    trace = simulate(plan.graph, platform, plan.paged.schedule)
    assert trace.violation is None
    assert max(trace.timeline_bytes[0]) <= budget
    assert trace.serial_ns == plan.paged.serial_ns
    assert plan.rotor.cost_ns <= plan.time_ns <= trace.serial_ns


class Tickets:
    """The plan with tokens that make the queues of the judge wait where ours do.

    The judge starts a copy as soon as its link is free, and never waits for the end of
    a copy out. A token without bytes that is computed by one queue, carried by way of a
    clock (device 2) with instant links, and read by another makes the second wait.
    """

    def __init__(self, plan: OffloadPlan) -> None:
        graph = plan.graph
        self.storages = list(graph.storages)
        # Before and after the boundary.
        self.tickets: tuple[list[Op], list[Op]] = ([], [])
        self.is_backward = False
        self.first = graph.forward_count
        steps: list[Step] = []
        pages = plan.paged.pages
        for stop, step in enumerate(plan.paged.stops):
            for p in pages:
                if p.awaited == stop:
                    steps += [*self.await_copy(p.storage), Discard(p.storage, 0)]
            for p in sorted(pages, key=lambda p: (p.end, p.start, p.storage)):
                if p.issued == stop:
                    steps += [*self.hold_link(), Copy(p.storage, 1, 0)]
                    steps.append(Discard(p.storage, 1))
            steps.append(step)
            self.is_backward = self.is_backward or isinstance(step, Boundary)
            for p in sorted(pages, key=lambda p: (p.end, p.start, p.storage)):
                if p.start == stop:
                    steps.append(Copy(p.storage, 0, 1))
        ops = [
            replace(
                op,
                cost_ns=(*op.cost_ns, None),
                workspace_bytes=(*op.workspace_bytes, 0),
            )
            for op in graph.ops
        ]
        self.graph = TrainingGraph(
            name="with tickets",
            storages=tuple(self.storages),
            ops=(
                *ops[: self.first],
                *self.tickets[0],
                *ops[self.first :],
                *self.tickets[1],
            ),
            final_outputs=graph.final_outputs,
            device_kinds=("cpu", "host"),
        )
        self.schedule = self.with_discards(plan, steps)

    def ticket(self, reads: tuple[int, ...], *, on_host: bool) -> tuple[int, int]:
        self.storages.append(Storage(name="token", size_bytes=0))
        token = len(self.storages) - 1
        costs = (None, 0) if on_host else (0, None)
        tickets = self.tickets[self.is_backward]
        tickets.append(
            Op(
                name="ticket",
                reads=reads,
                writes=(token,),
                cost_ns=costs,
                workspace_bytes=(0, 0),
                phase=Phase.BACKWARD if self.is_backward else Phase.FORWARD,
            )
        )
        # Marked until the number of the ops is known.
        mark = LATER if self.is_backward else EARLIER
        return mark + len(tickets) - 1, token

    def hold_link(self) -> list[Step]:
        op, token = self.ticket((), on_host=False)
        return [
            Compute(op, 0),
            Copy(token, 0, 2),
            Discard(token, 0),
            Copy(token, 2, 1),
            Copy(token, 1, 0),
        ]

    def await_copy(self, storage: int) -> list[Step]:
        op, token = self.ticket((storage,), on_host=True)
        wait, _ = self.ticket((token,), on_host=False)
        return [Compute(op, 1), Copy(token, 1, 2), Copy(token, 2, 0), Compute(wait, 0)]

    def with_discards(self, plan: OffloadPlan, steps: list[Step]) -> Schedule:
        """Number the ops, and take the other discards from the plan's own steps."""

        def numbered(step: Step) -> Step:
            if not isinstance(step, Compute):
                return step
            if step.op >= LATER:
                shift = len(plan.graph.ops) + len(self.tickets[0])
                return Compute(step.op - LATER + shift, step.device)
            if step.op >= EARLIER:
                return Compute(step.op - EARLIER + self.first, step.device)
            shift = len(self.tickets[0]) if step.op >= self.first else 0
            return Compute(step.op + shift, step.device)

        own = iter(plan.paged.schedule.steps)
        result: list[Step] = []
        stops = set(map(id, plan.paged.stops))
        following = list(own)
        position = 0
        for step in steps:
            result.append(numbered(step))
            if id(step) in stops:
                while following[position] is not step:
                    position += 1
                position += 1
                for after in following[position:]:
                    if not isinstance(after, Discard) or after.device:
                        break
                    if self.is_own_discard(plan, after.storage, step):
                        result.append(after)
                    position += 1
        return Schedule(tuple(result))

    def is_own_discard(self, plan: OffloadPlan, storage: int, stop: Step) -> bool:
        index = next(i for i, s in enumerate(plan.paged.stops) if s is stop)
        return not any(
            p.storage == storage and p.awaited == index + 1 for p in plan.paged.pages
        )


@settings(max_examples=80)
@given(stage_chains(max_stages=7), st.integers(1, 60), speeds)
def test_plans_are_judged_serially(
    chain: StageChain, budget: int, link: HostLink
) -> None:
    plan = plan_offload(chain, budget, link, candidates=6)
    rotor = plan_rotor(chain, budget)
    if rotor is not None:
        assert plan is not None
        assert plan.time_ns <= rotor.cost_ns
    if plan is not None:
        judge_serially(plan, budget, link)


@settings(max_examples=80)
@given(stage_chains(max_stages=7), st.integers(1, 60), speeds)
def test_overlapped_time_and_peak_are_those_of_the_judge(
    chain: StageChain, budget: int, link: HostLink
) -> None:
    plan = plan_offload(chain, budget, link, candidates=6)
    if plan is None:
        return
    form = Tickets(plan)
    instant = [
        Link(source=a, target=b, bytes_per_s=GIGA)
        for a, b in ((0, 2), (2, 0), (1, 2), (2, 1))
    ]
    platform = Platform(
        devices=(
            Device(budget_bytes=budget),
            Device(name="host", kind="host"),
            Device(name="clock", kind="host"),
        ),
        links=(*links(link), *instant),
    )
    trace = simulate(form.graph, platform, form.schedule)
    assert trace.violation is None
    assert trace.overlapped_ns == plan.time_ns
    assert trace.peak_bytes[0] <= budget


@settings(max_examples=60)
@given(stage_chains(max_stages=6), st.integers(0, 50))
def test_without_a_link_it_is_rotor(chain: StageChain, budget: int) -> None:
    plan, rotor = plan_offload(chain, budget, NO_LINK), plan_rotor(chain, budget)
    assert (plan is None) == (rotor is None)
    if plan is not None and rotor is not None:
        assert plan.time_ns == plan.rotor.cost_ns == rotor.cost_ns
        assert plan.paged.paged_bytes == 0


@settings(max_examples=60)
@given(stage_chains(max_stages=6, max_options=3), st.integers(1, 40))
def test_with_unlimited_speed_there_is_no_overhead(
    chain: StageChain, budget: int
) -> None:
    # Every stage runs the quickest option that fits the budget on its own.
    # A copy takes a nanosecond at least: times are made large beside that.
    chain = replace(
        chain,
        stages=tuple(
            replace(
                stage,
                forward_ns=stage.forward_ns * 10**6,
                options=tuple(
                    replace(
                        o,
                        forward_ns=None
                        if o.forward_ns is None
                        else o.forward_ns * 10**6,
                        backward_ns=o.backward_ns * 10**6,
                    )
                    for o in stage.options
                ),
            )
            for stage in chain.stages
        ),
    )
    values, gradients = chain.value_bytes, chain.gradient_bytes
    turn = values[-1] + gradients[-1] + chain.turn_workspace_bytes
    needs = [
        [
            max(
                values[i] + values[i + 1] + stage.forward_workspace_bytes,
                values[i] + values[i + 1] + o.saved_bytes + o.forward_workspace_bytes,
                values[i]
                + gradients[i]
                + gradients[i + 1]
                + o.backward_workspace_bytes
                + o.saved_bytes
                + (values[i + 1] if o.needs_output else 0),
            )
            for o in stage.options
        ]
        for i, stage in enumerate(chain.stages)
    ]
    budget = max(budget, turn, *map(min, needs))
    least = chain.turn_ns + sum(
        min(
            (stage.forward_ns if o.forward_ns is None else o.forward_ns) + o.backward_ns
            for o, need in zip(stage.options, those, strict=True)
            if need <= budget
        )
        for stage, those in zip(chain.stages, needs, strict=True)
    )
    plan = plan_offload(
        chain, budget, HostLink(out_bytes_per_s=10**30, in_bytes_per_s=10**30)
    )
    assert plan is not None
    assert plan.rotor.cost_ns == least
    assert plan.time_ns - least <= 2 * len(plan.paged.pages)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_dominated_option_does_no_harm(is_first: bool) -> None:
    def option(saved: int, workspace: int, *, needs_output: bool) -> StageOption:
        return StageOption(
            forward_ns=10**6,
            backward_ns=10**6,
            saved_bytes=saved,
            needs_output=needs_output,
            backward_workspace_bytes=workspace,
        )

    def chain(*, is_dominated: bool) -> StageChain:
        stages: list[Stage] = []
        for saved, workspace, size in ((3, 2, 2), (0, 1, 3)):
            options = [option(saved, workspace, needs_output=False)]
            if is_dominated:
                worse = option(saved + 1, workspace, needs_output=True)
                options.insert(0 if is_first else 1, worse)
            stages.append(
                Stage(forward_ns=10**6, output_bytes=size, options=tuple(options))
            )
        return StageChain(
            stages=tuple(stages),
            input_bytes=1,
            input_gradient_bytes=1,
            turn_workspace_bytes=1,
        )

    for speed in (10**15, 10**6):
        link = HostLink(out_bytes_per_s=speed, in_bytes_per_s=speed)
        for budget in (9, 12, 15):
            alone = plan_offload(chain(is_dominated=False), budget, link)
            both = plan_offload(chain(is_dominated=True), budget, link)
            assert alone is not None
            assert both is not None
            assert both.time_ns == alone.time_ns
            judge_serially(both, budget, link)
    fast = HostLink(out_bytes_per_s=10**15, in_bytes_per_s=10**15)
    best = plan_offload(chain(is_dominated=True), 9, fast)
    assert best is not None
    assert best.time_ns == 4_000_001
    assert plan_offload(chain(is_dominated=True), 3, fast) is None


def test_a_faster_link_helps_by_hand() -> None:
    option = StageOption(forward_ns=10, backward_ns=20, needs_output=False)
    stage = Stage(forward_ns=10, output_bytes=10, options=(option,))
    chain = StageChain(stages=(stage,) * 6, input_bytes=10)
    times = [
        plan.time_ns
        for speed in (GIGA // 10, GIGA // 2, GIGA, 4 * GIGA)
        if (
            plan := plan_offload(
                chain,
                50,
                HostLink(out_bytes_per_s=speed, in_bytes_per_s=speed),
            )
        )
    ]
    assert times == sorted(times, reverse=True)
    # A copy in 10 ns hides behind a stage of 10 ns: nothing is lost.
    assert times[2] == chain.least_ns == 180
    assert times[0] > 180


def test_bad_input_is_refused() -> None:
    option = StageOption(forward_ns=1, backward_ns=1)
    chain = StageChain(stages=(Stage(forward_ns=1, output_bytes=1, options=(option,)),))
    with pytest.raises(InvalidGraphError, match="out_bytes_per_s of a host link is -1"):
        HostLink(out_bytes_per_s=-1, in_bytes_per_s=1)
    with pytest.raises(InvalidGraphError, match="candidates is 0"):
        plan_offload(chain, 10, NO_LINK, candidates=0)
    graph = TrainingGraph(
        name="one op",
        storages=(Storage(name="x", size_bytes=1),),
        ops=(
            Op(
                name="f",
                reads=(),
                writes=(0,),
                cost_ns=(1,),
                workspace_bytes=(0,),
                phase=Phase.FORWARD,
            ),
        ),
    )
    with pytest.raises(InvalidGraphError, match="without copies"):
        page(graph, Schedule((Compute(0), Copy(0, 0, 1))), 10, NO_LINK)
