"""Optimal schedules of chains, and of chains that join.

The pebble game on homogeneous chains and joins, the dynamic programs on chains of
unequal stages, and rematerialisation with offload on a chain.
"""
