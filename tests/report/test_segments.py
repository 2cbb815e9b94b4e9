"""The picture of a forward graph cut into segments."""

from pathlib import Path

import pytest

from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.report.figures import save_figure
from remat.report.segments import places, segments_figure

DIAMOND = ForwardGraph(
    memory_bytes=(2, 3, 5, 1),
    cost=(1, 10, 10, 1),
    edges=((0, 1), (0, 2), (1, 3), (2, 3)),
    name="diamond",
)


def test_columns_are_depths_and_parallel_values_share_one():
    at = places(DIAMOND)
    assert [x for x, _ in at] == [0, 1, 1, 2]
    assert at[1][1] - at[2][1] == 1
    assert at[0][1] == at[3][1] == (at[1][1] + at[2][1]) / 2


def test_long_graphs_are_wrapped_into_rows():
    count = 60
    chain = ForwardGraph(
        memory_bytes=(1,) * count,
        cost=(1,) * count,
        edges=tuple((v, v + 1) for v in range(count - 1)),
    )
    at = places(chain)
    assert len({y for _, y in at}) == 3
    assert len(set(at)) == count
    assert at[24][0] == at[0][0]
    assert at[24][1] < at[0][1]


def test_values_are_numbered_by_segment_and_kept_ones_counted(tmp_path: Path):
    ax = segments_figure(DIAMOND, (0, 0, 1, 1))
    assert [text.get_text() for text in ax.texts if text.get_text()] == list("1122")
    # d({0, 1}): value 0 is read by 2, value 1 by 3.
    assert ax.get_title() == "diamond: 4 values in 2 segments, 2 kept between them"
    assert [line.get_marker() for line in ax.lines] == ["s", "s", "o", "o"]
    save_figure(ax, tmp_path / "segments.svg")
    assert (tmp_path / "segments.svg").stat().st_size > 1000


def test_other_partitions_are_refused():
    with pytest.raises(ValueError, match="segment"):
        segments_figure(DIAMOND, (1, 0, 0, 1))
