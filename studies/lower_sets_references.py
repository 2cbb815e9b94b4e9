"""What is known of the lower-set paper's seven graphs without this package.

References
----------
.. [1] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019. Graphs and programs: github.com/pfnet-research/recompute.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What is known of a network without this package.

    Parameters
    ----------
    lower_sets
        How many there are.
    smallest_exact_gb, smallest_pruned_gb
        Smallest budgets of the exact and of the approximate program of the paper.
    variants
        For each program and objective of the paper at its smallest budget: the peak in
        GB that a simulation finds after liveness, and the overhead in percent of one
        forward pass, the last segment included as in the paper.
    chen_formula_gb, chen_live_gb
        Peak of Chen's method by the formula, and after liveness.
    reported_percent
        Peak reduction that the authors measured: their best variant.
    """

    lower_sets: int
    smallest_exact_gb: float
    smallest_pruned_gb: float
    variants: dict[str, tuple[float, float]]
    chen_formula_gb: float
    chen_live_gb: float
    reported_percent: int


def _variants(
    live_gb: Sequence[float], overhead: Sequence[float]
) -> dict[str, tuple[float, float]]:
    names = ("exact MC", "exact TC", "approximate MC", "approximate TC")
    return dict(zip(names, zip(live_gb, overhead, strict=True), strict=True))


# Computed by independent programs on the published graphs (batch sizes of the files;
# 32 for the two networks without one), as [1] defines them; "reported" is from the
# authors' poster.
REFERENCES: dict[str, Reference] = {
    "vgg19": Reference(
        lower_sets=47,
        smallest_exact_gb=2.107,
        smallest_pruned_gb=2.107,
        variants=_variants((2.068, 2.084, 2.068, 2.084), (83, 22, 83, 22)),
        chen_formula_gb=2.563,
        chen_live_gb=1.952,
        reported_percent=36,
    ),
    "unet": Reference(
        lower_sets=331,
        smallest_exact_gb=5.546,
        smallest_pruned_gb=5.784,
        variants=_variants((5.519, 5.542, 4.778, 5.463), (87, 65, 97, 52)),
        chen_formula_gb=21.376,
        chen_live_gb=11.791,
        reported_percent=48,
    ),
    "resnet50": Reference(
        lower_sets=241,
        smallest_exact_gb=1.259,
        smallest_pruned_gb=1.310,
        variants=_variants((1.169, 1.256, 1.073, 1.307), (95, 59, 98, 44)),
        chen_formula_gb=2.261,
        chen_live_gb=1.310,
        reported_percent=62,
    ),
    "resnet152": Reference(
        lower_sets=581,
        smallest_exact_gb=1.464,
        smallest_pruned_gb=1.464,
        variants=_variants((1.368, 1.461, 1.387, 1.455), (98, 85, 98, 88)),
        chen_formula_gb=2.466,
        chen_live_gb=1.451,
        reported_percent=75,
    ),
    "densenet161": Reference(
        lower_sets=569,
        smallest_exact_gb=1.676,
        smallest_pruned_gb=1.676,
        variants=_variants((1.614, 1.663, 1.614, 1.663), (96, 57, 96, 57)),
        chen_formula_gb=3.160,
        chen_live_gb=1.927,
        reported_percent=81,
    ),
    "pspnet": Reference(
        lower_sets=12_533,
        smallest_exact_gb=1.194,
        smallest_pruned_gb=1.227,
        variants=_variants((1.194, 1.194, 1.170, 1.170), (98, 93, 98, 95)),
        chen_formula_gb=3.824,
        chen_live_gb=2.059,
        reported_percent=71,
    ),
    "googlenet": Reference(
        lower_sets=27_358,
        smallest_exact_gb=0.488,
        smallest_pruned_gb=0.488,
        variants=_variants((0.408, 0.486, 0.385, 0.458), (98, 6.6, 97, 67)),
        chen_formula_gb=1.345,
        chen_live_gb=0.729,
        reported_percent=39,
    ),
}
