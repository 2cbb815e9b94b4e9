"""Training graphs: what is derived from them, and every rule they must keep."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import graphs

from remat.core.errors import InvalidGraphError
from remat.core.graph import Op, Phase, Storage, TrainingGraph


def op(
    name: str,
    reads: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    phase: Phase = Phase.FORWARD,
    **facts: Any,
) -> Op:
    facts = {"cost_ns": (1,), "workspace_bytes": (0,), **facts}
    return Op(name=name, reads=reads, writes=writes, phase=phase, **facts)


W, A, Y, T, G = range(5)
STORAGES = (
    Storage(name="w", size_bytes=8, is_resident=True),
    Storage(name="a", size_bytes=4),
    Storage(name="y", size_bytes=2),
    Storage(name="t", size_bytes=2),
    Storage(name="g", size_bytes=8),
)
OPS = (
    op("f", (W,), (A, Y)),
    op("show", (Y,)),
    op("b", (A, T), (G,), Phase.BACKWARD),
)


def graph(**changes: Any) -> TrainingGraph:
    facts: dict[str, Any] = {
        "name": "small",
        "storages": STORAGES,
        "ops": OPS,
        "forward_outputs": (Y,),
        "tangents": (T,),
        "final_outputs": (G,),
        **changes,
    }
    return TrainingGraph(**facts)


# --- what is derived ------------------------------------------------------------------


def test_forward_ops_are_counted():
    assert graph().forward_count == 2


def test_producers_and_consumers():
    assert graph().producers == (None, 0, 0, None, 2)
    assert graph().consumers == ((0,), (2,), (1,), (2,), ())


def test_resident_bytes_are_those_of_the_device():
    far = replace(STORAGES[W], home=1, size_bytes=3)
    both = graph(
        storages=(*STORAGES, far), ops=(*OPS[:2], replace(OPS[2], reads=(A, T, 5)))
    )
    assert both.resident_bytes() == 8
    assert both.resident_bytes(1) == 3
    assert both.resident_bytes(2) == 0


def test_kinds_are_found_by_name():
    facts = {"cost_ns": (1, None), "workspace_bytes": (0, 0)}
    two = graph(
        device_kinds=("cpu", "cuda"), ops=tuple(replace(o, **facts) for o in OPS)
    )
    assert (two.kind_index("cpu"), two.kind_index("cuda")) == (0, 1)
    with pytest.raises(InvalidGraphError, match="'tpu'; it has costs for cpu, cuda"):
        two.kind_index("tpu")


def test_an_op_with_a_reason_is_not_recomputable():
    assert op("f").is_recomputable
    assert not op("f", non_recomputable="it draws").is_recomputable
    assert not op("f", non_recomputable="").is_recomputable


def test_graphs_are_equal_by_value():
    assert graph() == graph()
    assert hash(graph()) == hash(graph())
    assert graph() != graph(name="other")


@given(graphs(max_ops=9))
def test_producers_and_consumers_agree_with_the_ops(drawn: TrainingGraph):
    for index, one in enumerate(drawn.ops):
        assert all(drawn.producers[storage] == index for storage in one.writes)
        assert all(index in drawn.consumers[storage] for storage in one.reads)
        assert (index < drawn.forward_count) == (one.phase is Phase.FORWARD)
    assert sum(map(len, drawn.consumers)) == sum(len(o.reads) for o in drawn.ops)


# --- what is allowed ------------------------------------------------------------------


def test_a_resident_may_be_an_output():
    assert graph(forward_outputs=(Y, W), final_outputs=(G, W)).forward_outputs == (Y, W)


def test_a_graph_may_lack_a_backward_or_a_forward():
    only_forward = graph(ops=OPS[:2], storages=STORAGES[:4], final_outputs=())
    assert only_forward.forward_count == 2
    only_backward = TrainingGraph(
        name="backward",
        storages=(Storage(name="t", size_bytes=1),),
        ops=(op("b", (0,), (), Phase.BACKWARD),),
        tangents=(0,),
    )
    assert only_backward.forward_count == 0


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Storage(name="a", size_bytes=-1),
            "size_bytes of storage 'a' is -1; it must be an integer of at",
        ),
        (lambda: Storage(name="a", size_bytes=1, home=-1), "home of storage 'a' is -1"),
        (lambda: op("f", cost_ns=()), "0 costs and 1 workspaces"),
        (lambda: op("f", cost_ns=(), workspace_bytes=()), "at least one"),
        (lambda: op("f", cost_ns=(1, 2)), "2 costs and 1 workspaces"),
        (lambda: op("f", cost_ns=(None,)), "can run on no device kind"),
        (
            lambda: op("f", cost_ns=(-1,)),
            "cost_ns of op 'f' is -1; it must be an integer of at least 0",
        ),
        (lambda: op("f", workspace_bytes=(-1,)), "workspace_bytes of op 'f' is -1"),
        (lambda: op("f", (1, 1)), r"reads a storage twice: \(1, 1\)"),
        (lambda: op("f", (), (1, 1)), "writes a storage twice"),
    ],
)
def test_storages_and_ops_that_cannot_be(make: Any, words: str):
    with pytest.raises(InvalidGraphError, match=words):
        make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_kinds": ()}, "distinct and not empty"),
        ({"device_kinds": ("cpu", "cpu")}, "distinct and not empty"),
        ({"device_kinds": ("cpu", "cuda")}, "op 0 'f' has 1 costs for 2 device kinds"),
        ({"ops": ()}, "there is no op"),
        (
            {"ops": (op("f", (W,), (A, Y), cost_ns=(2**53,)), *OPS[1:])},
            "times on device kind 'cpu' come to 9_007_199_254_7.* ns",
        ),
        (
            {"ops": (op("f", (W,), (A, Y), workspace_bytes=(2**53,)), *OPS[1:])},
            "sizes on device kind 'cpu' come to 9_007_199_254_7.* B, the largest being",
        ),
        (
            {"forward_outputs": (Y, Y)},
            r"forward_outputs lists a storage twice: \(2, 2\)",
        ),
        ({"tangents": (T, T)}, "tangents lists a storage twice"),
        ({"final_outputs": (G, G)}, "final_outputs lists a storage twice"),
        ({"forward_outputs": (5,)}, "forward_outputs names storage 5 of 5"),
        ({"final_outputs": (-1,)}, "final_outputs names storage -1 of 5"),
        ({"tangents": (T, W)}, "tangent 'w' is also resident"),
        ({"tangents": (T, A)}, "op 0 'f' writes storage 1 'a', which is resident or a"),
        ({"tangents": ()}, "op 2 'b' reads storage 3 't' before it exists"),
        ({"forward_outputs": (G,)}, "forward output 4 'g' does not exist at the bound"),
        ({"forward_outputs": (T,)}, "forward output 3 't' does not exist at the bound"),
        (
            {"storages": (*STORAGES, Storage(name="lost", size_bytes=1))},
            "storage 5 'lost' is neither resident, nor a tangent, nor written",
        ),
        (
            {"ops": (OPS[0], OPS[2], OPS[1])},
            "forward op 2 'show' follows a backward op",
        ),
        ({"ops": (OPS[1], OPS[0], OPS[2])}, "op 0 'show' reads storage 2 'y' before"),
        ({"ops": (op("f", (9,)), *OPS)}, "op 0 'f' names storage 9 of 5"),
        ({"ops": (op("f", (-1,)), *OPS)}, "op 0 'f' names storage -1 of 5"),
        ({"ops": (op("f", (), (5,)), *OPS)}, "op 0 'f' names storage 5 of 5"),
        (
            {"ops": (*OPS, op("again", (), (G,), Phase.BACKWARD))},
            "storage 4 'g' is written twice, the second time by op 3 'again'",
        ),
        ({"ops": (op("f", (), (W,)), *OPS)}, "writes storage 0 'w', which is resident"),
        ({"ops": (op("early", (T,)), *OPS)}, "op 0 'early' reads storage 3 't' before"),
    ],
)
def test_graphs_that_cannot_be(changes: dict[str, Any], words: str):
    with pytest.raises(InvalidGraphError, match=words) as caught:
        graph(**changes)
    assert "graph 'small': " in str(caught.value)


def test_what_writes_an_output_that_the_caller_holds_runs_once():
    words = "op 0 'f' that writes it may run again: say in its non_recomputable why not"
    with pytest.raises(InvalidGraphError, match=words) as caught:
        graph(final_outputs=(G, Y))
    assert "storage 2 'y' is both a forward and a final output" in str(caught.value)
    once = (replace(OPS[0], non_recomputable="the caller holds y"), *OPS[1:])
    assert graph(final_outputs=(G, Y), ops=once).held_outputs == {Y}


def test_the_caller_holds_what_is_handed_over_and_asked_for_at_the_end():
    assert graph().held_outputs == frozenset()
    assert graph(final_outputs=(G, T)).held_outputs == {T}
    both = graph(forward_outputs=(W,), final_outputs=(G, W))
    assert both.held_outputs == {W}


def test_a_forward_output_must_exist_even_without_a_backward():
    with pytest.raises(InvalidGraphError, match="does not exist at the boundary"):
        graph(
            ops=OPS[:2], storages=STORAGES[:4], final_outputs=(), forward_outputs=(T,)
        )


def test_an_op_cannot_read_what_it_writes():
    with pytest.raises(InvalidGraphError, match="before it exists"):
        graph(ops=(op("f", (A,), (A, Y)), *OPS[1:]))


@given(graphs(max_ops=6), st.data())
def test_ops_in_another_order_are_refused_when_an_input_is_missing(
    drawn: TrainingGraph, data: st.DataObject
):
    order = data.draw(st.permutations(range(len(drawn.ops))))
    ops = tuple(drawn.ops[index] for index in order)
    made: set[int] = {s for s, b in enumerate(drawn.storages) if b.is_resident}
    works, was_backward, callers_turn = True, False, False
    for one in ops:
        is_backward = one.phase is Phase.BACKWARD
        if is_backward and not was_backward:
            works &= made >= set(drawn.forward_outputs)
            made |= set(drawn.tangents)
        works &= is_backward >= was_backward and made >= set(one.reads)
        if is_backward and not was_backward:
            callers_turn = False
        works &= one.is_external or not callers_turn
        callers_turn |= one.is_external
        was_backward |= is_backward
        made |= set(one.writes)
    if not was_backward:
        works &= made >= set(drawn.forward_outputs)
    if works:
        assert replace(drawn, ops=ops).ops == ops
    else:
        with pytest.raises(InvalidGraphError):
            replace(drawn, ops=ops)


def test_work_of_the_caller_comes_last_and_sees_what_leaves():
    def callers(reads: tuple[int, ...]) -> Op:
        return replace(
            op("loss", reads, ()),
            is_external=True,
            non_recomputable="it is done by the caller",
        )

    forward = [one for one in OPS if one.phase is Phase.FORWARD]
    backward = [one for one in OPS if one.phase is Phase.BACKWARD]
    assert len(graph(ops=(*forward, callers((Y,)), *backward)).ops) == len(OPS) + 1
    with pytest.raises(InvalidGraphError, match="of the pass follows it"):
        graph(ops=(*forward[:-1], callers(()), forward[-1], *backward))
    with pytest.raises(InvalidGraphError, match="no external op of that pass reads it"):
        graph(ops=(*forward, callers(()), *backward))
