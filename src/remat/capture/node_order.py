"""The order of a graph's nodes."""

import heapq

from torch import fx

from remat.torch_compat.attributes import root_of


def put_in_order(graph: fx.Graph, rank: dict[fx.Node, float]) -> None:
    """Sort the nodes, in place: after what they read, and else by rank."""
    nodes = list(graph.nodes)
    missing = {node: len(node.all_input_nodes) for node in nodes}
    place = {node: i for i, node in enumerate(nodes)}
    ready = [(rank[node], place[node]) for node in nodes if not missing[node]]
    heapq.heapify(ready)
    anchor = root_of(graph)
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        anchor.append(node)
        anchor = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (rank[user], place[user]))
    graph.lint()
