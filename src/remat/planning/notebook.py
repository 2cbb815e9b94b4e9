"""A plan as notebooks show it: HTML with a table and a picture of memory over time.

The text is well-formed XML. Pictures are drawn by hand as small SVGs in the notebook's
own text colour: no drawing library is loaded, and no display is needed.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from remat.core.timelines import Timeline
from remat.core.units import format_bytes, format_ns

_WIDTH, _HEIGHT = 560, 180
_LEFT, _TOP, _RIGHT, _BOTTOM = 80, 12, 20, 22
# From Okabe and Ito's palette: readable on white and on black, by any eyes.
_COLOURS = ("#7f7f7f", "#0072b2")
_BUDGET_COLOUR = "#d55e00"


def html_page(title: str, rows: Sequence[tuple[str, str]], *parts: str) -> str:
    """Return a title, a table of labels with what they are, and further parts.

    Parameters
    ----------
    title, rows
        Any text; it is escaped.
    parts
        HTML that follows: :func:`html_section`, :func:`memory_picture`.
    """
    return f"<div><strong>{escape(title)}</strong>{_table(rows)}{''.join(parts)}</div>"


def html_section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a table that opens when its title is clicked on."""
    return f"<details><summary>{escape(title)}</summary>{_table(rows)}</details>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cell = '<td style="text-align:left">'
    lines = [
        f"<tr>{cell}{escape(one)}</td>{cell}{escape(other)}</td></tr>"
        for one, other in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def memory_picture(
    title: str, timelines: Mapping[str, Timeline], *, budget_bytes: int | None
) -> str:
    """Return a picture of bytes in use over one step, as SVG with a legend.

    Parameters
    ----------
    title
        What is shown, for people; it is escaped.
    timelines
        One or two by name, drawn in this order; the last one is filled.
    budget_bytes
        Drawn as a line; ``None`` for no line.

    Notes
    -----
    A column of the picture shows the most bytes in use while it lasts, so that a plan
    of any length has a small picture, and no peak is lost.
    """
    end_ns = max(timeline.end_ns for timeline in timelines.values()) or 1
    sizes = [timeline.peak_bytes for timeline in timelines.values()]
    top_bytes = max(*sizes, budget_bytes or 0, 1)
    drawn = [_grid(top_bytes, end_ns)]
    legend: list[str] = []
    for position, (name, timeline) in enumerate(timelines.items()):
        colour = _COLOURS[position - len(timelines)]
        is_last = position == len(timelines) - 1
        line = _line(timeline, end_ns, top_bytes)
        if is_last:
            drawn.append(
                f'<path d="{line}V{_HEIGHT}H0Z" fill="{colour}" opacity="0.2"/>'
            )
        drawn.append(f'<path d="{line}" fill="none" stroke="{colour}"/>')
        legend.append(
            _key(colour, f"{name}: peak {format_bytes(timeline.peak_bytes)}", "solid")
        )
        if is_last and timeline.boundary_ns is not None:
            x = timeline.boundary_ns * _WIDTH // end_ns
            drawn.append(
                f'<path d="M{x} {_HEIGHT}v5" stroke="currentColor"/>'
                f'<text x="{x}" y="{_HEIGHT + 17}" text-anchor="middle">backward</text>'
            )
    if budget_bytes is not None:
        y = _y(budget_bytes, top_bytes)
        drawn.append(
            f'<path d="M0 {y}H{_WIDTH}" stroke="{_BUDGET_COLOUR}" '
            'stroke-width="1.5" stroke-dasharray="6 3"/>'
        )
        legend.append(
            _key(_BUDGET_COLOUR, f"budget: {format_bytes(budget_bytes)}", "dashed")
        )
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    return (
        f'<div>{escape(title)}<br/><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px" font-size="11" fill="currentColor">'
        f'<g transform="translate({_LEFT} {_TOP})">{"".join(drawn)}</g></svg>'
        f"<br/>{' '.join(legend)}</div>"
    )


def _y(size_bytes: int, top_bytes: int) -> float:
    return round(_HEIGHT * (1 - size_bytes / top_bytes), 1)


def _line(timeline: Timeline, end_ns: int, top_bytes: int) -> str:
    """Return the path of a timeline, one step a column at most."""
    most: dict[int, int] = {}
    points = [*timeline.points, (timeline.end_ns, 0)]
    for (start_ns, size), (stop_ns, _) in pairwise(points):
        first, last = start_ns * _WIDTH // end_ns, stop_ns * _WIDTH // end_ns
        for column in {first, min(first + 1, last), last}:
            most[column] = max(most.get(column, 0), size)
    steps = "".join(f"H{x}V{_y(most[x], top_bytes)}" for x in sorted(most))
    return f"M0 {_HEIGHT}{steps}"


def _grid(top_bytes: int, end_ns: int) -> str:
    """Return axes, with a line at each multiple of a power of two."""
    step_bytes = 1 << (top_bytes // 4).bit_length()
    lines = [
        f'<path d="M0 {y}H{_WIDTH}" stroke="currentColor" opacity="{0.2 if size else 1}"/>'
        f'<text x="-6" y="{y + 4}" text-anchor="end">{format_bytes(size)}</text>'
        for size in range(0, top_bytes + 1, step_bytes)
        for y in [_y(size, top_bytes)]
    ]
    end = f'<text x="{_WIDTH}" y="{_HEIGHT + 17}" text-anchor="end">{format_ns(end_ns)}</text>'
    return "".join(lines) + end


def _key(colour: str, text: str, style: str) -> str:
    line = f"border-top:2px {style} {colour};display:inline-block;width:1.5em"
    return (
        f'<span style="margin-right:1.5em"><span style="{line};vertical-align:middle">'
        f"</span> {escape(text)}</span>"
    )
