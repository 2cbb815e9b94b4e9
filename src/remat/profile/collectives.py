"""What operators cost in which all processes of a group take part.

They are never run for planning: all processes would have to, at the same time, and
one that finds its costs on disk would leave the others waiting. No schedule runs one
twice, so what they take is the same in every plan, and decides nothing.

Time is that of a ring [1]_ over a link of :data:`LINK_BYTES_PER_S`. Memory beside
inputs and outputs is what torch's process groups were seen to allocate: gloo, which is
used on CPUs, gathers into one block and copies it, and adds up in a copy of what it is
given; NCCL works in the tensors themselves.

References
----------
.. [1] P. Patarasuk, X. Yuan. Bandwidth optimal all-reduce algorithms for clusters of
   workstations. Journal of Parallel and Distributed Computing 69(2), 2009.
   https://doi.org/10.1016/j.jpdc.2008.09.002
"""

from remat.profile.arguments import tensors_in
from remat.profile.operators import OperatorCall, OperatorCost
from remat.torch_compat.collectives import exchange_of

LINK_BYTES_PER_S = {"cpu": 10**9, "cuda": 10**11}
"""Device kind -> bytes per second that a process is taken to send and receive."""

_LINK_LATENCY_NS = 20_000


def collective_cost(call: OperatorCall) -> OperatorCost:
    """Return what a collective operator is taken to cost.

    Parameters
    ----------
    call
        The operator and its arguments, with what it returns of fake tensors.
    """
    given, made = tensors_in([call.args, dict(call.kwargs)]), tensors_in(call.outputs)
    sizes = tuple(tensor.untyped_storage().nbytes() for tensor in made)
    given_bytes, made_bytes = sum(t.nbytes for t in given), sum(t.nbytes for t in made)
    exchange, place = exchange_of(call.target), made[0].device.type
    # A ring passes everything on twice where it is added up and handed out again.
    passed_bytes = max(given_bytes, made_bytes) * (2 if "reduce" in exchange else 1)
    if "reduce_scatter" in exchange:
        passed_bytes = given_bytes
    return OperatorCost(
        cost_ns=exchange_ns(passed_bytes, place),
        workspace_bytes=exchange_workspace_bytes(
            exchange, given_bytes, made_bytes, place
        ),
        output_bytes=sum(sizes),
        output_sizes_bytes=sizes,
        aliases_input=False,
        samples=0,
        spread_ns=0,
    )


def exchange_ns(passed_bytes: int, device_type: str) -> int:
    """Return how long a process is taken to send and receive so many bytes."""
    rate = LINK_BYTES_PER_S.get(device_type, LINK_BYTES_PER_S["cuda"])
    return _LINK_LATENCY_NS + passed_bytes * 10**9 // rate


def exchange_workspace_bytes(
    exchange: str, given_bytes: int, made_bytes: int, device_type: str
) -> int:
    """Return the bytes that an exchange takes beside what it is given and makes.

    Parameters
    ----------
    exchange
        What torch names it, ``"all_gather"`` or ``"reduce_scatter"`` for example.
    given_bytes, made_bytes
        What one process gives to it, and what it gets.
    device_type
        Where these are.
    """
    if device_type != "cpu":
        return 0
    if exchange.startswith("all_gather"):
        return made_bytes
    if exchange.startswith(("reduce_scatter", "shard_dim_alltoall")):
        return given_bytes
    return 0
