"""Certificates: the verifier takes what is true, and nothing that is not."""

import math
import random
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from tests.bounds.drawn_graphs import Solved, solved_cases
from tests.instances import INSTANCES

from remat.bounds.certificate import (
    MEMORY_ROW_BITS,
    ROW_BITS,
    RULES_VERSION,
    certified_bound_ns,
)
from remat.bounds.instance import instance_of
from remat.bounds.moment_program import MomentProgram, default_chain
from remat.bounds.time_bound import TimeBounds, solved
from remat.core.certificate import Certificate
from remat.core.errors import CertificateError
from remat.core.graph import TrainingGraph
from remat.planning.one_device import plain_peak_bytes


@cache
def proofs(count: int = 60) -> tuple[tuple[Solved, Certificate, int], ...]:
    """Return cases with a certificate each, and what it proves."""
    chooser = random.Random(3)
    found: list[tuple[Solved, Certificate, int]] = []
    for case in solved_cases(count):
        step = instance_of(case.graph)
        assert step is not None
        moments = tuple(
            node
            for node in default_chain(step)
            if node == step.boundary or chooser.random() < 0.6
        )
        proof = solved(MomentProgram(step, case.memory_bytes, moments))
        assert proof is not None
        found.append((case, proof[1], proof[0]))
    return tuple(found)


def accepts(case: Solved, certificate: Certificate, claim_ns: int) -> bool:
    try:
        return (
            certified_bound_ns(case.graph, case.budget_bytes, certificate) >= claim_ns
        )
    except CertificateError:
        return False


def test_true_certificates_are_accepted_and_prove_no_more_than_is_true():
    for case, certificate, bound_ns in proofs():
        assert accepts(case, certificate, bound_ns)
        assert not accepts(case, certificate, bound_ns + 1)
        assert bound_ns <= case.optimum_ns


def weak_duality(case: Solved, certificate: Certificate) -> Fraction | None:
    """Return what a certificate proves, by the definition; ``None`` if it is none."""
    step = instance_of(case.graph)
    assert step is not None
    try:
        program = MomentProgram(step, certificate.memory_bytes, certificate.moments)
    except CertificateError:
        return None
    rows = program.program
    numbers = [row for row, _ in certificate.multipliers]
    if (
        certificate.version != RULES_VERSION
        or certificate.memory_bytes < case.memory_bytes
        or numbers != sorted({*numbers}.intersection(range(rows.row_count)))
        or any(multiplier < 0 for _, multiplier in certificate.multipliers)
    ):
        return None
    reduced = [Fraction(cost) for cost in rows.cost]
    total = Fraction(0)
    for row, multiplier in certificate.multipliers:
        bits = MEMORY_ROW_BITS if rows.is_memory[row] else ROW_BITS
        weight = Fraction(multiplier, 1 << bits)
        total += weight * rows.right[row]
        for entry in range(rows.starts[row], rows.starts[row + 1]):
            reduced[rows.columns[entry]] -= weight * rows.coefficients[entry]
    # The least that each variable can add, from its least value to 1.
    for value, is_forced in zip(reduced, rows.is_forced, strict=True):
        total += min(value * is_forced, value)
    return total


def test_the_verifier_computes_what_weak_duality_says():
    for case, certificate, bound_ns in proofs(20):
        total = weak_duality(case, certificate)
        assert total is not None
        assert bound_ns - 1 < total <= bound_ns


def changed(certificate: Certificate, chooser: random.Random) -> Certificate:
    """Return a certificate with something in it that its maker did not put there."""
    multipliers = [*certificate.multipliers]
    place = chooser.randrange(len(multipliers)) if multipliers else 0
    row, value = multipliers[place] if multipliers else (0, 1)
    match chooser.randrange(12):
        case 0:
            multipliers[place : place + 1] = [(row, value * chooser.randint(2, 50))]
        case 1:
            multipliers[place : place + 1] = [(row, -value)]
        case 2:
            multipliers[place : place + 1] = [(row + chooser.randint(-3, 3), value)]
        case 3:
            multipliers += [(row, value)]
        case 4:
            multipliers = [(r, v * chooser.randint(0, 40)) for r, v in multipliers]
        case 5:
            size = 1 << chooser.choice([ROW_BITS, MEMORY_ROW_BITS])
            multipliers = [(r, chooser.randrange(9 * size)) for r in range(row + 9)]
        case 6:
            multipliers += [(10**6, 10**20)]
        case 7:
            moments = list(certificate.moments)
            chooser.shuffle(moments)
            return replace(certificate, moments=tuple(moments))
        case 8:
            extra = chooser.randrange(12)
            return replace(certificate, moments=(extra, *certificate.moments))
        case 9:
            return replace(certificate, moments=certificate.moments[:-1])
        case 10:
            less = certificate.memory_bytes - chooser.randint(1, 9)
            return replace(certificate, memory_bytes=less)
        case _:
            return replace(certificate, version=certificate.version + 1)
    return replace(certificate, multipliers=tuple(multipliers))


def test_a_thousand_corrupted_certificates_are_rejected():
    # Corrupted is what claims more than its multipliers prove: the definition says how
    # much that is. What is changed and still proves its claim is no corruption. And
    # whatever is changed, nothing proves more than exhaustive search finds to be true.
    chooser = random.Random(4)
    known = proofs()
    rejected = 0
    while rejected < 1000:
        case, certificate, bound_ns = chooser.choice(known)
        for _ in range(chooser.randint(1, 3)):
            certificate = changed(certificate, chooser)
        claim_ns = bound_ns + chooser.choice([0, 0, 1, 50])
        proved = weak_duality(case, certificate)
        is_true = proved is not None and math.ceil(proved) >= claim_ns
        assert accepts(case, certificate, claim_ns) is is_true
        assert not accepts(case, certificate, case.optimum_ns + 1)
        rejected += not is_true


def test_certificates_of_other_steps_and_budgets_prove_nothing_untrue():
    chooser = random.Random(5)
    known = proofs()
    for _ in range(500):
        (case, _, _), (_, certificate, _) = chooser.choice(known), chooser.choice(known)
        assert not accepts(case, certificate, case.optimum_ns + 1)


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return INSTANCES["resnet"]().graph


def certificate_of(graph: TrainingGraph, budget_bytes: int) -> tuple[Certificate, int]:
    bounds = TimeBounds(graph, budget_bytes)
    bounds.prove(1 << 62)
    assert bounds.certificate is not None
    return bounds.certificate, bounds.best_ns


def test_what_is_proved_with_more_memory_holds_with_less(graph: TrainingGraph):
    budget = plain_peak_bytes(graph) * 6 // 10
    certificate, bound_ns = certificate_of(graph, budget)
    assert certified_bound_ns(graph, budget, certificate) == bound_ns
    assert certified_bound_ns(graph, budget - 1000, certificate) == bound_ns
    with pytest.raises(CertificateError, match=r"proved for .* bytes beyond resident"):
        certified_bound_ns(graph, budget + 1, certificate)


def test_errors_say_what_is_wrong_with_a_certificate(graph: TrainingGraph):
    budget = plain_peak_bytes(graph) // 2
    certificate, _ = certificate_of(graph, budget)
    row, value = certificate.multipliers[0]
    wrong = {
        "version 9": replace(certificate, version=9),
        "it must be at least 0": replace(certificate, multipliers=((row, -value),)),
        "rows ascend": replace(certificate, multipliers=((row, 1), (row, 1))),
        "the boundary": replace(certificate, moments=()),
    }
    for words, corrupted in wrong.items():
        with pytest.raises(CertificateError, match=words):
            certified_bound_ns(graph, budget, corrupted)


def test_no_multipliers_prove_that_what_must_run_runs(graph: TrainingGraph):
    step = instance_of(graph)
    assert step is not None
    budget = plain_peak_bytes(graph) // 2
    certificate, bound_ns = certificate_of(graph, budget)
    empty = replace(certificate, multipliers=())
    proved = certified_bound_ns(graph, budget, empty)
    assert 0 < proved <= sum(step.cost_ns[k] for k in step.order) < bound_ns
