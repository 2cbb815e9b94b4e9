"""Random chains of stages."""

from hypothesis import strategies as st

from remat.algorithms.chains.stages import Stage, StageChain, StageOption

sizes = st.integers(0, 4)
times = st.integers(0, 9)


@st.composite
def options(draw: st.DrawFn, forward_ns: int) -> StageOption:
    """Options of a stage; now and then one without forward."""
    if draw(st.integers(0, 5)) == 0:
        return StageOption(
            forward_ns=None,
            backward_ns=draw(times),
            needs_output=False,
            backward_workspace_bytes=draw(sizes),
        )
    return StageOption(
        forward_ns=forward_ns + draw(st.integers(0, 1)),
        backward_ns=draw(times),
        saved_bytes=draw(sizes),
        needs_output=draw(st.booleans()),
        forward_workspace_bytes=draw(sizes),
        backward_workspace_bytes=draw(sizes),
    )


@st.composite
def stages(draw: st.DrawFn, max_options: int = 2) -> Stage:
    """Stages with some options."""
    forward_ns = draw(times)
    return Stage(
        forward_ns=forward_ns,
        output_bytes=draw(sizes),
        gradient_bytes=draw(st.one_of(st.none(), sizes)),
        forward_workspace_bytes=draw(sizes),
        options=tuple(
            draw(st.lists(options(forward_ns), min_size=1, max_size=max_options))
        ),
    )


@st.composite
def stage_chains(draw: st.DrawFn, max_stages: int, max_options: int = 2) -> StageChain:
    """Chains with some stages."""
    return StageChain(
        stages=tuple(
            draw(st.lists(stages(max_options), min_size=1, max_size=max_stages))
        ),
        input_bytes=draw(sizes),
        input_gradient_bytes=draw(sizes),
        turn_ns=draw(times),
        turn_workspace_bytes=draw(sizes),
    )
