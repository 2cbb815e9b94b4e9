"""Which sizes are tried, against exhaustive search."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from remat.planning.batch_sizes import SizeSearch, TriedSize
from remat.planning.plan import Plan


class Planned:
    """What the search reads of a plan."""

    def __init__(self, baseline_peak_bytes: int) -> None:
        self.baseline_peak_bytes = baseline_peak_bytes


@given(
    resident=st.integers(0, 1000),
    slope=st.integers(1, 50),
    curve=st.sampled_from([0.0, 0.1, 3.0]),
    saving=st.sampled_from([1, 2, 7]),
    limit=st.integers(1, 3000),
    least=st.integers(1, 20),
    most=st.none() | st.integers(20, 400),
    multiple_of=st.sampled_from([1, 2, 8]),
)
def test_the_largest_size_is_found_in_few_tries(
    resident: int,
    slope: int,
    curve: float,
    saving: int,
    limit: int,
    least: int,
    most: int | None,
    multiple_of: int,
) -> None:
    def plain(size: int) -> int:
        return resident + size * slope + int(curve * size * size)

    def needed(size: int) -> int:
        return resident + (plain(size) - resident) // saving

    budget = needed(least) + limit

    def tried(size: int) -> TriedSize:
        plan = Planned(plain(size)) if needed(size) <= budget else None
        return TriedSize(
            size=size, needed_bytes=needed(size), plan=cast("Plan | None", plan)
        )

    search = SizeSearch(
        tried(least),
        budget_bytes=budget,
        resident_bytes=resident,
        most=most,
        multiple_of=multiple_of,
    )
    sizes: list[int] = []
    for size in search.sizes():
        sizes.append(size)
        assert len(sizes) <= 30
        search.take(tried(size))
    assert len(set(sizes)) == len(sizes)
    assert all(size % multiple_of == 0 and size > least for size in sizes)
    fitting = [least]
    size = (least // multiple_of + 1) * multiple_of
    while needed(size) <= budget and (most is None or size <= most):
        fitting.append(size)
        size += multiple_of
    assert search.fits.size == fitting[-1]


def test_guesses_that_are_far_off_give_way_to_halving() -> None:
    """Beyond 1000 a step needs so much that each guess is next to what fits."""

    def tried(size: int) -> TriedSize:
        fits = size <= 1000
        plan = cast("Plan", Planned(size)) if fits else None
        return TriedSize(size=size, needed_bytes=size if fits else 10**9, plan=plan)

    search = SizeSearch(
        tried(1), budget_bytes=10_000, resident_bytes=0, most=None, multiple_of=1
    )
    sizes: list[int] = []
    for size in search.sizes():
        sizes.append(size)
        assert len(sizes) <= 30
        search.take(tried(size))
    assert search.fits.size == 1000
