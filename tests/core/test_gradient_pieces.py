"""Gradients that are added to existing ones leave in pieces, each when it is ready."""

from remat.core.gradient_pieces import LEAST_BYTES, added_pieces, divided, ready_at
from remat.core.graph import Op, Phase, Storage, TrainingGraph

MIB = 1 << 20


def op(reads: tuple[int, ...], writes: tuple[int, ...], phase: Phase) -> Op:
    return Op(
        name="op",
        reads=reads,
        writes=writes,
        cost_ns=(1,),
        workspace_bytes=(0,),
        phase=phase,
    )


def graph(*sizes_bytes: int) -> TrainingGraph:
    """One forward op makes storage 0; the backward ops make 1, then 2 and 3, then 4."""
    return TrainingGraph(
        name="step",
        storages=tuple(
            Storage(name=f"s{number}", size_bytes=size)
            for number, size in enumerate(sizes_bytes)
        ),
        ops=(
            op((), (0,), Phase.FORWARD),
            op((0,), (1,), Phase.BACKWARD),
            op((0,), (2, 3), Phase.BACKWARD),
            op((1,), (4,), Phase.BACKWARD),
        ),
        forward_outputs=(0,),
        final_outputs=(1, 2, 3, 4),
    )


def test_a_gradient_is_ready_when_no_other_op_needs_it() -> None:
    # Storage 0 is made by the forward pass, and 1 is read by the last op once more.
    found = ready_at(graph(1, 1, 1, 1, 1), range(5))
    assert found == {0: 2, 1: 3, 2: 2, 3: 2, 4: 3}


def test_what_is_ready_at_once_leaves_together() -> None:
    gradients = {4: [0], 3: [1], 2: [5, 7], 1: [3]}
    pieces = added_pieces(graph(MIB, MIB, MIB, MIB, MIB), gradients, {}, {})
    assert {op: set(piece) for op, piece in pieces.items()} == {2: {1, 5, 7}, 3: {0, 3}}


def test_gradients_leave_in_their_turn() -> None:
    gradients = {1: [0], 2: [1], 3: [2], 4: [3]}
    sizes = MIB, MIB, 1, MIB, MIB
    in_turn = {0: 1, 1: 0, 2: 3, 3: 2}
    pieces = added_pieces(graph(*sizes), gradients, {}, in_turn)
    # The third one is ready sooner, and waits for its turn.
    assert pieces == {3: (1, 0, 3, 2)}
    pieces = added_pieces(graph(*sizes), gradients, {}, {0: 2, 1: 0, 2: 1, 3: 3})
    assert pieces == {2: (1, 2), 3: (0, 3)}


def test_small_gradients_do_not_leave_early() -> None:
    assert added_pieces(graph(0, LEAST_BYTES - 1, 0, 0, 0), {1: [0]}, {}, {}) == {}
    assert added_pieces(graph(0, LEAST_BYTES, 0, 0, 0), {1: [0]}, {}, {}) == {3: (0,)}


def test_gradients_of_a_step_without_backward_ops_do_not_leave_early() -> None:
    forward = TrainingGraph(
        name="step",
        storages=(Storage(name="s", size_bytes=LEAST_BYTES),),
        ops=(op((), (0,), Phase.FORWARD),),
        final_outputs=(0,),
    )
    assert added_pieces(forward, {0: [0]}, {}, {}) == {}


def test_pieces_are_large_and_few() -> None:
    ready = [((position,), MIB // 2) for position in range(1000)]
    pieces = divided(ready, MIB)
    assert [position for piece in pieces for position in piece] == list(range(1000))
    # A 64th of all is more than a MiB here.
    assert 32 <= len(pieces) <= 64
    assert {len(piece) for piece in divided(ready[:20], MIB)} == {2}
