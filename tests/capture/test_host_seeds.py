"""Seeds of attention that lie on the host."""

import operator

import torch
from torch import fx

from remat.capture.host_seeds import is_host_seed, with_seeds_on_host

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_efficient_attention.default
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def test_seed_and_offset_are_found_among_the_results_of_attention() -> None:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "qkv"]
    made = graph.call_function(FORWARD, (*given, None, True, 0.1))
    other = graph.call_function(aten.max.dim, (given[0], 0))
    found = [
        is_host_seed(graph.call_function(operator.getitem, (source, position)))
        for source, count in ((made, 4), (other, 3))
        for position in range(count)
    ]
    assert found == [False, False, True, True, False, False, False]
    assert not is_host_seed(made)


def test_an_operator_that_reads_them_gets_them_on_the_host() -> None:
    schema = [argument.name for argument in BACKWARD._schema.arguments]
    values = tuple(torch.empty(2, device="meta") for _ in range(9))
    seeds = [torch.tensor(7), torch.tensor(8)]

    class Elsewhere(torch.Tensor):
        """A tensor that says it is on a card, until it is asked for on the host."""

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return seeds.pop(0)

    args = list(values)
    for name in ("philox_seed", "philox_offset"):
        args[schema.index(name)] = torch.empty(()).as_subclass(Elsewhere)
    given = with_seeds_on_host(BACKWARD, (*args, 0.1, [True] * 4))
    assert [int(given[7]), int(given[8])] == [7, 8]
    assert all(a is b for a, b in zip(given[:7], args[:7], strict=True))
    assert with_seeds_on_host(aten.add.Tensor, values) is values
