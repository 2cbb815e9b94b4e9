"""Certificates of bounds on time, and the verifier, in exact integer arithmetic.

Weak duality: for a program ``min c x, A x >= b, l <= x <= 1`` and any multipliers
``y >= 0``, every x that keeps the rows has ``c x >= y b + sum of min(r, r l)`` over the
variables, with ``r = c - A^T y``. So a list of moments and one multiplier a row prove a
bound, wherever the multipliers come from. The verifier makes the rows itself, from the
graph, the budget and the moments, and computes with integers only.
"""

import math
from collections.abc import Sequence

from remat.bounds.instance import instance_of
from remat.bounds.moment_program import MomentProgram, Program
from remat.core.certificate import Certificate
from remat.core.errors import CertificateError
from remat.core.graph import TrainingGraph

ROW_BITS = 16
"""Multipliers of plain rows count in 2^-16 nanoseconds."""

MEMORY_ROW_BITS = 40
"""Multipliers of rows that count bytes count in 2^-40 nanoseconds a byte."""

RULES_VERSION = 1
"""Of the rows; certificates are for the rows of one version."""


def bound_of(program: Program, multipliers: Sequence[tuple[int, int]]) -> int:
    """Return the bound that multipliers prove for a program, in its whole costs.

    Parameters
    ----------
    program
        In integers.
    multipliers
        As in a certificate.

    Raises
    ------
    CertificateError
        If there is no such row, rows do not ascend, or a multiplier is negative.
    """
    shift = MEMORY_ROW_BITS - ROW_BITS
    reduced = [cost << MEMORY_ROW_BITS for cost in program.cost]
    total = 0
    last = -1
    starts, columns, coefficients = (
        program.starts,
        program.columns,
        program.coefficients,
    )
    for row, multiplier in multipliers:
        if not last < row < program.row_count:
            msg = (
                f"row {row} follows row {last}; rows ascend, from 0 to "
                f"{program.row_count - 1}"
            )
            raise CertificateError(msg)
        if multiplier < 0:
            msg = f"the multiplier of row {row} is {multiplier}; it must be at least 0"
            raise CertificateError(msg)
        last = row
        weight = multiplier if program.is_memory[row] else multiplier << shift
        total += weight * program.right[row]
        for entry in range(starts[row], starts[row + 1]):
            reduced[columns[entry]] -= weight * coefficients[entry]
    for value, is_forced in zip(reduced, program.is_forced, strict=True):
        if is_forced or value < 0:
            total += value
    return -(-total >> MEMORY_ROW_BITS)


def rounded(
    program: Program, multipliers_ns: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """Return the multipliers of a certificate: a solver's, rounded down.

    Parameters
    ----------
    program
        What was solved.
    multipliers_ns
        Per row, nanoseconds for what it counts: runs, or bytes.
    """
    found: list[tuple[int, int]] = []
    for row, value in enumerate(multipliers_ns):
        bits = MEMORY_ROW_BITS if program.is_memory[row] else ROW_BITS
        scaled = value * (1 << bits)
        if 1 <= scaled < math.inf:
            found.append((row, int(scaled)))
    return tuple(found)


def certified_bound_ns(
    graph: TrainingGraph,
    budget_bytes: int,
    certificate: Certificate,
    kind: str | None = None,
) -> int:
    """Return the bound that a certificate proves for a step within a budget.

    This is the verifier. It trusts nothing but the graph: not where the certificate
    comes from, nor the step or the budget that it was made for.

    Parameters
    ----------
    graph, kind
        The step, and the kind of the one device; by default the first of the graph.
    budget_bytes
        Of the device, resident bytes included.
    certificate
        What is to be checked.

    Returns
    -------
    int
        Nanoseconds that every schedule on the one device takes at least: whatever the
        order of its ops, and however often it runs them. It may be below 0, where the
        multipliers are of no use here.

    Raises
    ------
    CertificateError
        If the certificate is of another version or proved for less memory, its moments
        or rows do not exist or are out of order, a multiplier is negative, or the step
        is not for one device.

    Notes
    -----
    Integers only; time linear in the rows of the program, about moments times reads.
    """
    if certificate.version != RULES_VERSION:
        msg = (
            f"the certificate is for rows of version {certificate.version}, but this "
            f"release makes those of version {RULES_VERSION} only; plan again"
        )
        raise CertificateError(msg)
    instance = instance_of(graph, kind)
    if instance is None:
        msg = f"graph {graph.name!r} is for several devices; bounds are for one"
        raise CertificateError(msg)
    memory_bytes = budget_bytes - instance.resident_bytes
    if memory_bytes > certificate.memory_bytes:
        msg = (
            f"the certificate is proved for {certificate.memory_bytes:_} bytes beyond "
            f"resident ones, but the budget leaves {memory_bytes:_}; plan again"
        )
        raise CertificateError(msg)
    program = MomentProgram(
        instance, certificate.memory_bytes, certificate.moments
    ).program
    return bound_of(program, certificate.multipliers)
