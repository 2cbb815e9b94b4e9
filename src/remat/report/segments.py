"""A picture of a forward graph cut into segments."""

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from remat.algorithms.lower_sets.formula import cached_values, check_segmentation
from remat.algorithms.lower_sets.forward_graph import ForwardGraph

# Neighbouring segments are told apart by colour, and by the number beside the first.
_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2")
_KEPT = "#d55e00"
_COLUMNS = 24
_ROW_GAP = 1.4


def places(graph: ForwardGraph) -> list[tuple[float, float]]:
    """Return where to draw each value: columns by depth, wrapped into rows.

    The depth of a value is the length of the longest path of edges to it, so that
    edges point to the right, or down to a later row.
    """
    depth = [0] * graph.node_count
    for v in graph.topological_order:
        depth[v] = max((depth[u] + 1 for u in graph.predecessors[v]), default=0)
    beside: defaultdict[int, list[int]] = defaultdict(list)
    for v in graph.topological_order:
        beside[depth[v]].append(v)
    tallest: defaultdict[int, int] = defaultdict(int)
    for column, values in beside.items():
        row = column // _COLUMNS
        tallest[row] = max(tallest[row], len(values))
    found = [(0.0, 0.0)] * graph.node_count
    for column, values in beside.items():
        row, x = divmod(column, _COLUMNS)
        top = -sum(tallest[above] - 1 + _ROW_GAP for above in range(row))
        middle = top - (tallest[row] - 1) / 2
        for index, v in enumerate(values):
            found[v] = (float(x), middle + (len(values) - 1) / 2 - index)
    return found


def segments_figure(
    graph: ForwardGraph, segment_of: Sequence[int], ax: Axes | None = None
) -> Axes:
    """Draw a forward graph, coloured by segment, the values that are kept marked.

    Parameters
    ----------
    graph
        The graph that is cut.
    segment_of
        Per value the index of its segment, such as
        :attr:`remat.algorithms.lower_sets.programs.Segmentation.segment_of`.
    ax
        Where to draw; by default on a new figure, as large as the graph needs.

    Raises
    ------
    ValueError
        If the segments are not those of an increasing sequence of lower sets.
    """
    count = check_segmentation(graph, segment_of)
    kept = set(cached_values(graph, segment_of))
    at = places(graph)
    height = max(y for _, y in at) - min(y for _, y in at) + 1
    if ax is None:
        size = (12.0, max(2.2, 1.0 + 0.42 * height))
        ax = Figure(figsize=size, layout="constrained").subplots()
    for u, v in graph.edges:
        (x, y), (to_x, to_y) = at[u], at[v]
        is_long = to_x != x + 1 or to_y != y
        # Curved, an edge that skips over values of its row does not cross them.
        bend = -0.25 if to_x > x + 1 and to_y == y else 0.0
        ax.annotate(
            "",
            (to_x, to_y),
            (x, y),
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#7f7f7f",
                "alpha": 0.35 if is_long else 0.8,
                "shrinkA": 5,
                "shrinkB": 5,
                "linewidth": 0.8,
                "connectionstyle": f"arc3,rad={bend}",
            },
        )
    for v, (x, y) in enumerate(at):
        segment = segment_of[v]
        ax.plot(
            x,
            y,
            marker="s" if v in kept else "o",
            markersize=11 if v in kept else 9,
            markerfacecolor=_COLOURS[segment % len(_COLOURS)],
            markeredgecolor=_KEPT if v in kept else "#404040",
            markeredgewidth=2.2 if v in kept else 0.6,
        )
        ax.text(x, y, str(segment + 1), ha="center", va="center", fontsize=6)
    ax.set_axis_off()
    ax.margins(0.03, 0.12)
    ax.set_title(
        f"{graph.name}: {graph.node_count} values in {count} segments, "
        f"{len(kept)} kept between them"
    )
    ax.legend(
        handles=[
            Line2D(
                [],
                [],
                linestyle="",
                marker="s",
                markersize=9,
                markerfacecolor="white",
                markeredgecolor=_KEPT,
                markeredgewidth=2.2,
                label="kept from forward to backward",
            ),
            Patch(color=_COLOURS[0], label="colour and number: segment"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=2,
        frameon=False,
        fontsize="small",
    )
    return ax
