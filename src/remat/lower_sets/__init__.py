"""Recomputation by increasing sequences of lower sets of the forward graph.

The abstraction and the programs of Kusumoto et al. (NeurIPS 2019): a forward graph with
a size and a cost a node, families of its lower sets, and dynamic programs over
increasing sequences of them.
"""
