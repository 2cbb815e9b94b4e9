"""Which kernels a step runs: those of eager PyTorch, or fused ones where they help."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from remat.capture.fused_kernel import FusedKernel
from remat.capture.fused_kernels import (
    FusionCandidate,
    bundled,
    fuse,
    fusion_candidates,
    norms_outside,
    recomputed_outside,
)
from remat.capture.fusion_groups import is_fusible
from remat.capture.joint_program import (
    example_value,
    needed_arguments,
    user_source_line,
)
from remat.capture.kernel_recomputation import (
    original_of,
    read_instead,
    recompute_in_backward,
)
from remat.capture.norm_parts import (
    BATCH_NORM,
    batch_norms,
    can_be_split,
    join_norms,
    norm_of,
    normalised,
    split_norms,
    whole_arguments,
)
from remat.core.errors import MissingDependencyError
from remat.profile.cache import CostCache
from remat.profile.operators import (
    Layout,
    OperatorCall,
    OperatorCost,
    layout_of,
    profile_operators,
    result_layouts,
)
from remat.solvers.base import ProgressCallback

_IS_QUICKER: dict[str, bool] = {}


def fuse_where_quicker(
    joint: fx.GraphModule, forward_output_count: int, on_progress: ProgressCallback
) -> frozenset[str]:
    """Fuse the operators of a traced step, in place, where that was measured to help.

    A kernel takes the place of its operators if it takes less time than they do one
    after the other, and hands over each result in a block of its own, of the layout and
    size that its operator gives it, so that memory is predicted as exactly as without.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors.
    forward_output_count
        How many of its outputs belong to the forward pass.
    on_progress
        Called while kernels are compiled and measured.

    Returns
    -------
    frozenset[str]
        The names of the kernels that were found to be quicker, with a plus between
        those of which all are taken or none.

    Raises
    ------
    MissingDependencyError
        If there is no compiler.
    ProfileError
        If a kernel or one of its operators cannot be run alone.
    """
    names: set[str] = set()

    def quicker(candidates: list[FusionCandidate]) -> list[FusionCandidate]:
        chosen = _quicker(joint, candidates, on_progress)
        names.update(_name(bundle) for bundle in bundled(chosen))
        return chosen

    _fuse(joint, forward_output_count, quicker)
    return frozenset(names)


def _fuse(
    joint: fx.GraphModule,
    forward_output_count: int,
    choose: Callable[[list[FusionCandidate]], list[FusionCandidate]],
) -> None:
    """Fuse what is chosen, with all that backward computes again inside of it.

    A batch norm is split if all its parts are in kernels; each round that finds one
    outside starts anew with that norm whole.
    """
    whole: set[int] = set()
    while True:
        candidates = _candidates(joint, forward_output_count, whole, choose)
        outside = norms_outside(joint, candidates)
        if not outside:
            fuse(joint, candidates)
            return
        whole |= outside
        read_instead(joint, [n for n in joint.graph.nodes if original_of(n)])
        join_norms(joint)


def _candidates(
    joint: fx.GraphModule,
    forward_output_count: int,
    whole: Collection[int],
    choose: Callable[[list[FusionCandidate]], list[FusionCandidate]],
) -> list[FusionCandidate]:
    """Return what is chosen, with all that backward computes again inside of it.

    Batch norms are split in parts, except for those with the numbers in ``whole``. If
    a part can be in no kernel, nothing is chosen yet, and all candidates are returned.
    """
    recompute_in_backward(joint, forward_output_count)
    split_norms(
        joint,
        [
            number
            for number, norm in enumerate(batch_norms(joint.graph))
            if number not in whole and is_fusible(norm) and can_be_split(joint, norm)
        ],
    )
    while True:
        candidates = fusion_candidates(joint)
        # Before anything is compiled: what can be in no kernel is not computed again,
        # and not split.
        outside = recomputed_outside(joint, candidates)
        if not outside and not norms_outside(joint, candidates):
            candidates = choose(candidates)
            outside = recomputed_outside(joint, candidates)
        if not outside:
            return candidates
        read_instead(joint, outside)


def _quicker(
    joint: fx.GraphModule,
    candidates: list[FusionCandidate],
    on_progress: ProgressCallback,
) -> list[FusionCandidate]:
    if not candidates:
        return []
    _check_compiler(candidates)
    proposed = candidates
    candidates = list(_in_expected_layouts(joint, candidates, on_progress))
    cache = CostCache()
    fused = profile_operators(
        [_kernel_call(joint, candidate) for candidate in candidates],
        cache=cache,
        on_progress=on_progress,
    )
    costs = {
        candidate: cost
        for candidate, cost in zip(candidates, fused, strict=True)
        if _is_faithful(candidate, cost)
    }
    bundles = [
        bundle for bundle in bundled(proposed) if all(c in costs for c in bundle)
    ]
    # Without the kernel nothing would be computed again.
    calls = [
        [
            call
            for candidate in bundle
            for node in candidate.members
            if original_of(node) is None
            for call in _calls(joint, node)
        ]
        for bundle in bundles
    ]
    single = iter(
        profile_operators(
            [call for group in calls for call in group],
            cache=cache,
            on_progress=on_progress,
        )
    )
    chosen: list[FusionCandidate] = []
    for bundle, group in zip(bundles, calls, strict=True):
        separate_ns = sum(next(single).cost_ns for _ in group)
        fused_ns = sum(costs[candidate].cost_ns for candidate in bundle)
        if is_quicker(_name(bundle), fused_ns, separate_ns):
            chosen += bundle
    return chosen


def _name(bundle: Iterable[FusionCandidate]) -> str:
    return "+".join(sorted(repr(candidate.kernel) for candidate in bundle))


def is_quicker(name: str, fused_ns: int, separate_ns: int) -> bool:
    """Return whether kernels of a name take less time than their operators.

    What is decided first of a name holds for this process: equal steps, such as one
    with and one without recomputation, run equal kernels.
    """
    return _IS_QUICKER.setdefault(name, fused_ns < separate_ns)


def fuse_named(
    joint: fx.GraphModule, forward_output_count: int, names: Collection[str]
) -> None:
    """Fuse the operators of a traced step, in place, into the kernels of these names.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors.
    forward_output_count
        How many of its outputs belong to the forward pass.
    names
        From :func:`fuse_where_quicker`. Kernels that the graph has no use for are
        passed over: the step is then another one than they were named for.
    """

    def named(candidates: list[FusionCandidate]) -> list[FusionCandidate]:
        known = [b for b in bundled(candidates) if _name(b) in names]
        return [candidate for bundle in known for candidate in bundle]

    if names:
        _fuse(joint, forward_output_count, named)


def _check_compiler(candidates: Sequence[FusionCandidate]) -> None:
    # The compiler takes a second to import, and most plans never need it.
    from remat.torch_compat.names import (  # noqa: PLC0415
        InvalidCxxCompiler,
        get_cpp_compiler,
    )

    devices = {t.meta["val"].device.type for c in candidates for t in c.results}
    if "cpu" not in devices:
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        msg = (
            "kernels='fused' needs a C++ compiler, and none was found; install g++ or "
            "clang, name one in the variable CXX, or leave kernels='eager'"
        )
        raise MissingDependencyError(msg) from error


def _in_expected_layouts(
    joint: fx.GraphModule,
    candidates: Sequence[FusionCandidate],
    on_progress: ProgressCallback,
) -> Iterator[FusionCandidate]:
    """Compile each kernel, and yield the candidates whose results lie as expected.

    What reads them was traced, and is measured, on the layouts of the operators.
    """
    layouts: dict[FusedKernel, list[Layout]] = {}
    for position, candidate in enumerate(candidates):
        kernel = candidate.kernel
        if kernel not in layouts:
            on_progress(f"compiling {kernel}", position / len(candidates))
            layouts[kernel] = result_layouts(_kernel_call(joint, candidate))
        expected = [layout_of(node.meta["val"]) for node in candidate.results]
        if layouts[kernel] == expected:
            yield candidate


def _kernel_call(joint: fx.GraphModule, candidate: FusionCandidate) -> OperatorCall:
    return OperatorCall(
        candidate.kernel,
        tuple(example_value(joint, node) for node in candidate.inputs),
        source=user_source_line(candidate.members[0]),
    )


def _calls(joint: fx.GraphModule, node: fx.Node) -> Iterator[OperatorCall]:
    """Yield what runs for an operator if it is in no kernel.

    The batch norm of which it is the second part; nothing for other parts.
    """
    target, arguments = cast("Callable[..., Any]", node.target), needed_arguments(node)
    if norm_of(node) is not None:
        if target is not normalised:
            return
        target, arguments = BATCH_NORM, whole_arguments(node)
    args: Any = fx.map_arg(arguments, lambda n: example_value(joint, n))
    kwargs: Mapping[str, Any] = fx.map_arg(
        dict(node.kwargs), lambda n: example_value(joint, n)
    )
    yield OperatorCall(target, args, kwargs, source=user_source_line(node))


def _is_faithful(candidate: FusionCandidate, cost: OperatorCost) -> bool:
    """Return whether each result is in a block of its own, of the expected size."""
    expected = tuple(_sizes(candidate))
    return not cost.aliases_input and cost.output_sizes_bytes == expected


def _sizes(candidate: FusionCandidate) -> Iterator[int]:
    for node in candidate.results:
        value: torch.Tensor = node.meta["val"]
        yield value.untyped_storage().nbytes()
