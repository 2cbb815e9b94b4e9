"""No plan has a race; whatever is taken out of one makes a race, and it is found."""

import pickle
import random
from collections import Counter

import pytest
from tests.runtime.orders import (
    is_racy_by_closure,
    is_racy_by_running,
    moved_one_by_one,
    random_case,
    random_orders,
    removed_one_by_one,
)

from remat.core.errors import RaceError
from remat.core.issue_order import (
    HOST,
    Allocate,
    Block,
    Free,
    HandOver,
    Instruction,
    IssueOrder,
    Record,
    Run,
    Wait,
)
from remat.core.races import Race, check_no_race, first_race
from remat.runtime.issuing import issue_orders


@pytest.mark.parametrize("plan_count", [50, 1000])
def test_no_false_alarm_on_random_plans(plan_count: int) -> None:
    waits = 0
    for seed in range(plan_count):
        for order in random_orders(seed, op_count=6):
            assert first_race(order) is None
            waits += sum(isinstance(one, Wait) for one in order.instructions)
    assert waits > 10 * plan_count


@pytest.mark.parametrize("plan_count", [5, 50])
def test_every_event_wait_and_queue_that_is_removed_is_found(plan_count: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(plan_count):
        for order in random_orders(seed):
            kinds.update(type(one).__name__ for one in order.instructions)
            for mutant in removed_one_by_one(order):
                assert first_race(mutant) is not None
                kinds["removed"] += 1
    assert kinds["Wait"] > 10 * plan_count
    assert kinds["Record"] > 10 * plan_count
    assert kinds["removed"] > 80 * plan_count


def test_what_is_moved_to_another_queue_is_found_where_it_matters() -> None:
    found: Counter[bool] = Counter()
    for seed in range(50):
        chance = random.Random(seed)
        for order in random_orders(seed, op_count=6):
            assert not is_racy_by_closure(order)
            for mutant in moved_one_by_one(order, chance):
                is_racy = first_race(mutant) is not None
                assert is_racy == is_racy_by_closure(mutant)
                found[is_racy] += 1
    # What the host does itself instead, and what the other queue orders just as well.
    assert found[True] > found[False] > 100


def test_the_check_agrees_with_all_ways_in_which_queues_can_run() -> None:
    found: Counter[bool] = Counter()
    for seed in range(12):
        chance = random.Random(seed)
        for order in random_orders(seed, op_count=2):
            assert not is_racy_by_running(order)
            for mutants in (removed_one_by_one(order), moved_one_by_one(order, chance)):
                for mutant in mutants:
                    is_racy = is_racy_by_running(mutant)
                    assert is_racy == is_racy_by_closure(mutant)
                    assert is_racy == (first_race(mutant) is not None)
                    found[is_racy] += 1
    assert min(found.values()) > 30


QUEUES = ((), (0,), (0, 1), (1, 0))
"""The host with its memory, a card, and the links there and back."""

NAMES = ("card", "host")


def first_of(*instructions: Instruction, blocks: tuple[Block, ...] = ()) -> Race | None:
    given = Block(0, 0, queue=1), Block(0, 1, queue=HOST)
    return first_race(IssueOrder(QUEUES, given + blocks, instructions))


MAKE = (Allocate(0, step=0), Run(1, step=0, reads=(), writes=(0,)))
"""The card computes a block."""

LET = (Record(0, queue=1, step=1), Wait(0, queue=2, step=1))
"""The link waits for the card."""

OFFLOAD = (Allocate(1, step=1), *LET, Run(2, step=1, reads=(0,), writes=(1,)))
"""The block is copied to the host, beside what follows."""

AWAIT = (Record(1, queue=2, step=1), Wait(1, queue=1, step=2))
"""The card waits for the link."""


class TestErrorsOfOtherTools:
    """Each is an order of a few instructions, wrong and as it should be."""

    def test_right_order_has_no_race(self) -> None:
        assert first_of(*MAKE, *OFFLOAD, *AWAIT, Free(0, step=2)) is None

    def test_a_source_is_freed_while_it_is_copied(self) -> None:
        # meta-pytorch/torchtune#1867, huggingface/diffusers#14657.
        assert first_of(*MAKE, *OFFLOAD, Free(0, step=2)) == Race(0, 5, 6)

    def test_a_source_is_overwritten_while_it_is_copied(self) -> None:
        write = Run(1, step=2, reads=(), writes=(0,))
        assert first_of(*MAKE, *OFFLOAD, write) == Race(0, 5, 6)

    def test_a_copy_begins_before_its_source_is_made(self) -> None:
        # pytorch/torchtitan#2581: inside of `with stream`, a stream waits for itself.
        itself = Record(0, queue=2, step=1), Wait(0, queue=2, step=1)
        copy = Run(2, step=1, reads=(0,), writes=(1,))
        assert first_of(*MAKE, Allocate(1, step=1), *itself, copy) == Race(0, 1, 5)

    def test_the_host_reads_before_the_copy_is_there(self) -> None:
        read = Run(HOST, step=2, reads=(1,), writes=())
        assert first_of(*MAKE, *OFFLOAD, read) == Race(1, 5, 6)
        # That the card waits is no use to the host.
        assert first_of(*MAKE, *OFFLOAD, *AWAIT, read) == Race(1, 5, 8)
        wait = Record(1, queue=2, step=1), Wait(1, queue=HOST, step=2)
        assert first_of(*MAKE, *OFFLOAD, *wait, read) is None

    def test_pinned_memory_is_handed_out_again_while_it_is_read(self) -> None:
        back = (Record(1, queue=2, step=1), Wait(1, queue=HOST, step=2))
        again = Allocate(2, step=3), Run(2, step=3, reads=(1,), writes=(2,))
        block = Block(0, 0, queue=2)
        order = (*MAKE, *OFFLOAD, *back, *again, Free(1, step=4))
        assert first_of(*order, blocks=(block,)) == Race(1, 9, 10)

    def test_a_copy_back_begins_before_the_copy_out_is_made(self) -> None:
        # NVIDIA/Megatron-LM#7398: it reads what is still being filled.
        fetch = (
            Allocate(2, step=2),
            Record(1, queue=1, step=2),
            Wait(1, queue=3, step=2),
        )
        back = Run(3, step=2, reads=(1,), writes=(2,))
        block = Block(0, 0, queue=1)
        order = (*MAKE, *OFFLOAD, *fetch, back)
        assert first_of(*order, blocks=(block,)) == Race(1, 5, 9)
        wait = Record(2, queue=2, step=1), Wait(2, queue=3, step=2)
        order = (*MAKE, *OFFLOAD, *fetch, *wait, back)
        assert first_of(*order, blocks=(block,)) is None

    def test_a_block_is_filled_before_the_last_use_of_the_memory_under_it(self) -> None:
        # vllm-project/vllm#47324, ROCm/ATOM#1956: the allocator hands out in the card's
        # order what the link fills.
        fetch = Allocate(0, step=0), Run(2, step=0, reads=(1,), writes=(0,))
        assert first_of(*fetch) == Race(0, 0, 1)

    def test_an_event_is_recorded_before_what_it_is_to_cover(self) -> None:
        # huggingface/trl#7195: a clone that is made after the wait.
        copy = Run(2, step=1, reads=(0,), writes=(1,))
        order = (MAKE[0], *LET, MAKE[1], Allocate(1, step=1), copy)
        assert first_of(*order) == Race(0, 3, 5)

    def test_an_event_that_is_recorded_too_late_holds_nothing_up(self) -> None:
        late = (LET[1], LET[0])
        copy = Run(2, step=1, reads=(0,), writes=(1,))
        assert first_of(*MAKE, Allocate(1, step=1), *late, copy) == Race(0, 1, 5)


def test_the_error_names_pair_block_and_steps() -> None:
    graph, _, _ = random_case(0)
    blocks = Block(0, 0, queue=1), Block(0, 1, queue=HOST)
    order = IssueOrder(QUEUES, blocks, (*MAKE, *OFFLOAD, Free(0, step=2)))
    with pytest.raises(RaceError) as caught:
        check_no_race(order, graph, NAMES)
    assert str(caught.value).startswith(
        "storage 0 'weight0' on device 'card': nothing makes its release at step 2 (the "
        "queue of device 'card') come after a read at step 1 (the link from 'card' to "
        "'host'), so the bytes may be wrong."
    )
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.storage, error.device, error.steps) == (0, 0, (1, 2))
    check_no_race(IssueOrder(QUEUES, blocks, MAKE), graph, NAMES)


def test_small_copies_are_the_hosts_and_wait_for_nothing() -> None:
    graph, schedule, is_on_host = random_case(3)
    on_host = [True] * len(is_on_host)
    for order in issue_orders(graph, schedule, on_host, least_bytes_beside=100):
        assert order.queues == ((),)
        kinds = {type(one) for one in order.instructions}
        assert kinds == {Allocate, Run, Free, HandOver}
