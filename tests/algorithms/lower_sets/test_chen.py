"""Chen's method as the paper ran it: published values and what it promises."""

import pytest
from studies.forward_graphs import (
    densenet161,
    published_file,
    resnet50,
    resnet152,
)
from tests.algorithms.lower_sets.brute_force import Sequences, lower_sets, random_graph

from remat.algorithms.lower_sets.canonical import (
    canonical_schedule,
    implied_training_graph,
)
from remat.algorithms.lower_sets.chen import chen_candidates, chen_segmentation
from remat.algorithms.lower_sets.choice import approximate_family
from remat.algorithms.lower_sets.families import Family, all_lower_sets
from remat.algorithms.lower_sets.formula import check_segmentation
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.core.liveness import insert_discards
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.instances.published import read_forward

# Peaks in GB by the formula, and after a liveness pass, of the published program.
PUBLISHED = {
    "vgg19": (2.563, 1.952),
    "unet": (21.376, 11.791),
    "resnet50": (2.261, 1.310),
    "resnet152": (2.466, 1.451),
    "densenet161": (3.160, 1.927),
    "pspnet": (3.824, 2.059),
    "googlenet": (1.345, 0.729),
}
SHAPES = {"resnet50": resnet50, "resnet152": resnet152, "densenet161": densenet161}


def complete(graph: ForwardGraph) -> Family:
    family = all_lower_sets(graph, 30_000)
    assert family is not None
    return family


@pytest.mark.parametrize("network", PUBLISHED)
def test_published_peaks(network: str) -> None:
    if network in SHAPES:
        graph = SHAPES[network]()
    else:
        file = published_file(network)
        if file is None:
            pytest.skip(f"cg_{network}.txt is not beside the repository")
        graph = read_forward(file)
    found = chen_segmentation(graph, complete(graph))
    training = implied_training_graph(graph)
    schedule = canonical_schedule(graph, found.segment_of)
    tighter = insert_discards(training, schedule.steps)
    trace = simulate(training, single_device(), tighter)
    assert trace.is_valid
    live_bytes = trace.peak_bytes[0]
    peaks = round(found.peak_bytes / 1e9, 3), round(live_bytes / 1e9, 3)
    assert peaks == PUBLISHED[network]
    # The approximate family holds every candidate of these networks.
    assert chen_segmentation(graph, approximate_family(graph)) == found


def test_candidates_have_one_value_on_their_boundary() -> None:
    for seed in range(60):
        graph = random_graph(seed)
        boundary = Sequences(graph).boundary
        everything = frozenset(range(graph.node_count))
        expected = {
            sum(1 << v for v in lower)
            for lower in lower_sets(graph)
            if len(boundary[lower]) == 1 or lower in {frozenset(), everything}
        }
        found = chen_candidates(graph, complete(graph))
        candidates = [mask for _, mask in found]
        assert set(candidates) == expected
        assert len(candidates) == len(expected)


def test_segmentations_are_valid_on_any_graph() -> None:
    for seed in range(100):
        graph = random_graph(seed, is_general=True)
        found = chen_segmentation(graph, complete(graph))
        assert check_segmentation(graph, found.segment_of) == found.segment_count
