"""Which options of a stage to offer a chain's program: none that another one beats.

The time of the program grows with the square of their number, so that no more than so
many are offered: of those that nothing beats, the ones go for which another does nearly
as well.
"""

from collections.abc import Sequence

from remat.algorithms.chains.stages import StageOption

_Measures = tuple[int, int, int, int, int]


def measures(option: StageOption) -> _Measures:
    """Return what counts of an option: each is better if smaller.

    Time of forward and backward, bytes that stay in between, the most bytes during
    forward and during backward, and whether the output has to be there.
    """
    return (
        (option.forward_ns or 0) + option.backward_ns,
        option.saved_bytes,
        option.saved_bytes + option.forward_workspace_bytes,
        option.saved_bytes + option.backward_workspace_bytes,
        int(option.needs_output),
    )


def chosen(options: Sequence[StageOption], most: int) -> list[int]:
    """Return the indices of the options to offer, the first always among them.

    Parameters
    ----------
    options
        At least one.
    most
        How many to offer at most, at least 1.

    Notes
    -----
    Time O(n^3) for n options.

    Examples
    --------
    >>> def option(backward_ns, saved_bytes):
    ...     return StageOption(
    ...         forward_ns=1, backward_ns=backward_ns, saved_bytes=saved_bytes
    ...     )
    >>> options = [option(10, 100), option(20, 50), option(30, 60), option(90, 0)]
    >>> chosen(options, 4)
    [0, 1, 3]
    >>> chosen(options, 2)
    [0, 3]
    """
    found = [measures(option) for option in options]
    kept = [
        index
        for index, one in enumerate(found)
        if not index
        or not any(
            _beats(other, one, is_earlier=earlier < index)
            for earlier, other in enumerate(found)
            if earlier != index
        )
    ]
    scale = [max(1, *values) for values in zip(*found, strict=True)]

    def loss(index: int) -> float:
        """How much worse in its worst respect the best substitute is."""
        return min(
            max(
                (theirs - ours) / unit
                for theirs, ours, unit in zip(
                    found[other], found[index], scale, strict=True
                )
            )
            for other in kept
            if other != index
        )

    while len(kept) > max(1, most):
        kept.remove(min(kept[1:], key=loss))
    return kept


def _beats(one: _Measures, other: _Measures, *, is_earlier: bool) -> bool:
    """Whether one is nowhere worse; of equals, the earlier one beats."""
    if one == other:
        return is_earlier
    return all(ours <= theirs for ours, theirs in zip(one, other, strict=True))
