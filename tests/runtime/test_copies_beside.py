"""Copies on threads of their own: bitwise whatever their speed, and none is lost."""

import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.device_schedules import logical, run_by, scattered
from tests.interrupts import interrupted
from tests.modules import make_case
from torch import fx

from remat.core.errors import ExecutionError, RaceError
from remat.core.graph import TrainingGraph
from remat.core.issue_order import IssueOrder, Wait
from remat.core.platform import Platform
from remat.core.schedule import Schedule
from remat.runtime import copies, lowering, queues
from remat.runtime.issuing import issue_orders
from remat.runtime.queues import CopyRun
from remat.training import step_backend
from remat.training.device_memory import measure_devices
from remat.training.fitted_model import FittedModel
from remat.training.verification import TrainingStep, compare

THREE = logical("cpu", "cpu:1", "host")
LINK = ("cpu", "cpu", "cpu", "host")
BACK = ("cpu", "cpu", "host", "cpu")


@pytest.fixture(autouse=True)
def _all_copies_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(lowering, "LEAST_BYTES_BESIDE", 0)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))


class Delays:
    """Lets copies chosen by chance begin late, and notes on which threads they are."""

    def __init__(self, seed: int, share: float = 0.1, longest_s: float = 0.02) -> None:
        self.chance = random.Random(seed)
        self.share, self.longest_s = share, longest_s
        self.threads: set[str] = set()

    def __call__(self, source: torch.Tensor, block: torch.Tensor) -> None:
        self.threads.add(threading.current_thread().name)
        if self.chance.random() < self.share:
            time.sleep(self.chance.random() * self.longest_s)
        block.copy_(source)


def scattered_step(name: str, *, evicted: float) -> tuple[TrainingStep, FittedModel]:
    """Return a case's step, and its model with a plan made by chance."""
    case = make_case(name)

    def choose(graph: TrainingGraph, arranged: Platform) -> Schedule:
        return scattered(graph, arranged, seed=3, eviction_share=evicted)

    fitted, _ = run_by(case, THREE, choose)
    return TrainingStep(case.model, case.args, case.kwargs, case.loss, None), fitted


def measured_bytes() -> tuple[int, ...]:
    """Return the measured peaks of the devices in a step with a plan made by chance."""
    step, fitted = scattered_step("conv net", evicted=0.5)
    resident = [step.model, step.args]
    with step.restored():
        return measure_devices(lambda: step.train(fitted), THREE, resident=resident)


class CardQueue(queues.HostQueue):
    """A device that has done what it is given, and gives events as a card does."""

    def __init__(self, run: CopyRun) -> None:
        self.run = run

    def record(self) -> queues.ThreadEvent:
        event = queues.ThreadEvent(self.run)
        event.happen()
        return event


class TestSteps:
    @pytest.mark.parametrize("name", ["conv net", "in-place"])
    def test_are_bitwise_eager_whatever_the_delays(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        delays = Delays(seed=1)
        monkeypatch.setattr(queues, "move_bytes", delays)
        step, fitted = scattered_step(name, evicted=0.7)
        with step.restored():
            assert not compare(step.outcome(None), step.outcome(fitted))
        assert len(delays.threads) > 2
        assert all(thread.startswith("remat") for thread in delays.threads)

    def test_are_bitwise_eager_where_devices_have_queues_of_their_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As on cards, except that an op of a device is done when it is issued.
        def on_cards(graph: Any, schedule: Any, is_on_host: Any, **rest: Any) -> Any:
            orders = issue_orders(graph, schedule, [False] * len(is_on_host), **rest)
            made.extend(orders)
            return orders

        def opened(run: CopyRun, key: queues.Key) -> Any:
            return CardQueue(run) if len(key) == 1 else queues.ThreadQueue(key, run)

        made: list[IssueOrder] = []
        monkeypatch.setattr(lowering, "issue_orders", on_cards)
        monkeypatch.setattr(CopyRun, "_open", opened)
        monkeypatch.setattr(queues, "move_bytes", Delays(seed=4))
        step, fitted = scattered_step("in-place", evicted=0.5)
        with step.restored():
            assert not compare(step.outcome(None), step.outcome(fitted))
        waits = {
            order.queues[one.queue]
            for order in made
            for one in order.instructions
            if isinstance(one, Wait)
        }
        # Devices, links, and no host.
        assert {(0,), (1,), (0, 1), (1, 0)} <= waits
        assert () not in waits

    def test_take_the_memory_that_they_take_when_the_host_copies(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Which is what is planned: tests/training/test_device_memory.py.
        monkeypatch.setattr(queues, "move_bytes", Delays(seed=2))
        beside = measured_bytes()
        monkeypatch.setattr(lowering, "LEAST_BYTES_BESIDE", 2**60)
        assert beside == measured_bytes()
        assert min(beside) > 0

    def test_without_waits_are_refused_and_would_be_wrong(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unordered(*arguments: Any, **options: Any) -> Any:
            return tuple(map(without_waits, issue_orders(*arguments, **options)))

        def without_waits(order: IssueOrder) -> IssueOrder:
            kept = [one for one in order.instructions if not isinstance(one, Wait)]
            return replace(order, instructions=tuple(kept))

        monkeypatch.setattr(lowering, "issue_orders", unordered)
        step, fitted = scattered_step("in-place", evicted=0.3)
        with step.restored(), pytest.raises(RaceError, match="nothing makes"):
            step.outcome(fitted)
        # The delays find what the check finds.
        monkeypatch.setattr(lowering, "check_no_race", lambda *_: None)
        monkeypatch.setattr(queues, "move_bytes", Delays(seed=1, share=0.5))
        step, fitted = scattered_step("in-place", evicted=0.3)
        with step.restored():
            expected = step.outcome(None)
            found = step.outcome(fitted)
        assert compare(expected, found)

    def test_raise_what_a_copy_raised_and_go_on_after_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, fitted = scattered_step("in-place", evicted=0.3)
        with step.restored():
            expected = step.outcome(None)
            assert not compare(expected, step.outcome(fitted))
            chance = random.Random(1)

            def fail(source: torch.Tensor, block: torch.Tensor) -> None:
                if chance.random() < 0.2:
                    msg = "the link is down"
                    raise OSError(msg)
                block.copy_(source)

            with monkeypatch.context() as patch:
                patch.setattr(queues, "move_bytes", fail)
                with pytest.raises(ExecutionError, match="OSError: the link is down"):
                    step.outcome(fitted)
            assert not compare(expected, step.outcome(fitted))


class ReadBack:
    """What a graph's code does to copies, read from its nodes alone.

    Knows nothing of the issue order: which copies are done when is followed node by
    node, and so is until when the code holds their blocks.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        # Per queue and per event, the copies that have been made by then.
        self.done: dict[Any, set[fx.Node]] = {(): set()}
        self.events: dict[fx.Node, set[fx.Node]] = {}
        self.copies: list[fx.Node] = []
        # Per copy, the place from which on the host knows that it is made.
        self.known: dict[fx.Node, int] = {}

    def check(self) -> int:
        """Check every use of what is copied, and return how many copies there are."""
        for node in self.nodes:
            key = node.args[0] if node.args else None
            match node.target:
                case copies.copy_bytes:
                    self.copy(node, key)
                case copies.record_event:
                    self.events[node] = self.by(key)
                case copies.wait_event:
                    self.by(key).update(self.events[node.args[1]])
                    for copy in self.done[()]:
                        self.known.setdefault(copy, self.place[node])
                case _:
                    # Others read what they take, or make a view of it to be read.
                    assert not self.unfinished(node.all_input_nodes, ())
        for copy in self.copies:
            # The copy lies in the block that was made for it.
            for held in (copy.args[1], copy):
                assert self.last_use(held) > self.known[copy], held
        return len(self.copies)

    def by(self, key: Any) -> set[fx.Node]:
        return self.done.setdefault(key, set())

    def copy(self, node: fx.Node, key: Any) -> None:
        done = self.by(key)
        # What is issued comes after all that the host knows.
        done |= self.done[()]
        assert not self.unfinished([node.args[1]], key)
        done.add(node)
        if key:
            self.copies.append(node)

    def unfinished(self, nodes: list[Any], key: Any) -> list[fx.Node]:
        # Whoever holds a copy's block only, or takes its size, reads nothing.
        return [
            node
            for node in nodes
            if node.target is copies.copy_bytes and node not in self.by(key)
        ]

    def last_use(self, node: Any) -> int:
        return max(self.place[user] for user in node.users)


class TestGraphs:
    @pytest.mark.parametrize("name", ["conv net", "in-place"])
    def test_wait_before_they_read_and_hold_until_copies_are_made(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def noted(*arguments: Any) -> lowering.LoweredStep:
            made.append(lowering.lower(*arguments))
            return made[-1]

        made: list[lowering.LoweredStep] = []
        monkeypatch.setattr(step_backend, "lower", noted)
        step, fitted = scattered_step(name, evicted=0.7)
        with step.restored():
            step.train(fitted)
        for lowered in made:
            assert ReadBack(lowered.forward.graph).check() > 5
            assert ReadBack(lowered.backward.graph).check() > 5

    def test_without_copies_are_run_as_they_are(self) -> None:
        module = fx.symbolic_trace(torch.nn.ReLU())
        assert copies.runnable(module) == module.forward


def block(value: int = 0) -> torch.Tensor:
    return torch.full((64,), value, dtype=torch.uint8)


class Gate:
    """Holds up every copy until it is opened, and counts those that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.begun = 0
        monkeypatch.setattr(queues, "move_bytes", self)

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.begun += 1
        self.reached.set()
        self.open.wait()
        target.copy_(source)


class TestQueues:
    def test_a_copy_is_beside_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate(monkeypatch)
        target = block()
        with CopyRun() as run:
            link = run.queue(LINK)
            link.copy(block(7), target)
            event = link.record()
            # Were the host to make it, it would stand before the gate for ever.
            gate.open.set()
            run.queue(()).wait(event)
            assert torch.equal(target, block(7))

    def test_a_link_waits_for_another_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        middle, target = block(), block()
        with CopyRun() as run:
            there, back = run.queue(LINK), run.queue(BACK)
            there.copy(block(7), middle)
            back.wait(there.record())
            back.copy(middle, target)
            event = back.record()
            assert gate.reached.wait(10)
            assert gate.begun == 1
            gate.open.set()
            event.synchronize()
        assert torch.equal(target, block(7))

    def test_blocks_are_let_go_when_the_event_happens(self) -> None:
        source, target = block(7), block()
        gone = [weakref.ref(source), weakref.ref(target)]
        with CopyRun() as run:
            link = run.queue(LINK)
            link.copy(source, target)
            event = link.record()
            del source, target
            event.synchronize()
            assert [reference() for reference in gone] == [None, None]

    def test_what_raises_leaves_no_copy_under_way(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        targets = [block(), block()]

        def stop() -> None:
            with CopyRun() as run:
                for target in targets:
                    run.queue(LINK).copy(block(7), target)
                assert gate.reached.wait(10)
                threading.Timer(0.05, gate.open.set).start()
                msg = "enough"
                raise ValueError(msg)

        with pytest.raises(ValueError, match="enough"):
            stop()
        # The first had begun, so it was waited for; the second never begins.
        assert gate.begun == 1
        assert torch.equal(targets[0], block(7))
        assert torch.equal(targets[1], block(0))

    def test_an_event_after_a_failed_copy_raises_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_source: torch.Tensor, _target: torch.Tensor) -> None:
            # The other link waits by then.
            time.sleep(0.05)
            raise MemoryError

        monkeypatch.setattr(queues, "move_bytes", fail)
        with CopyRun() as run:
            there, back = run.queue(LINK), run.queue(BACK)
            there.copy(block(), block())
            back.wait(there.record())
            back.copy(block(), block())
            event = back.record()
            with pytest.raises(ExecutionError, match="MemoryError") as caught:
                event.synchronize()
        assert isinstance(caught.value.__cause__, MemoryError)

    def test_two_steps_at_once_share_a_link(self) -> None:
        wrong: list[int] = []

        def work(value: int) -> None:
            for _ in range(50):
                target = block()
                with CopyRun() as run:
                    run.queue(LINK).copy(block(value), target)
                    run.queue(LINK).record().synchronize()
                if not torch.equal(target, block(value)):
                    wrong.append(value)

        threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_process_has_threads_of_its_own(self) -> None:
        assert copies_well()
        child = os.fork()
        if child == 0:
            os._exit(0 if copies_well() else 1)
        assert os.waitpid(child, 0)[1] == 0

    def test_an_interrupted_step_leaves_no_copy_under_way(self) -> None:
        assert interrupted(slow_copies) == ["1 begins", "1 ends"]


def copies_well() -> bool:
    """Return whether a copy beside the host arrives."""
    target = block()
    with CopyRun() as run:
        run.queue(LINK).copy(block(7), target)
        run.queue(LINK).record().synchronize()
    return torch.equal(target, block(7))


def slow_copies(begun: Callable[[], None]) -> list[str]:
    """Say what was copied by the time that an interrupted step has ended."""
    told: list[str] = []

    def copy(source: torch.Tensor, _target: torch.Tensor) -> None:
        told.append(f"{source[0]} begins")
        begun()
        time.sleep(0.5)
        told.append(f"{source[0]} ends")

    queues.move_bytes = copy
    try:
        with CopyRun() as run:
            link = run.queue(LINK)
            for value in (1, 2):
                link.copy(block(value), block())
            link.record().synchronize()
    except KeyboardInterrupt:
        return list(told)
    return ["was not interrupted"]
