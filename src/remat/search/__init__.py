"""Moves that several solvers share: evict, retain, page, overlap, place on devices.

Orders of a training graph's own ops, improved step by step. May import core and native;
complete methods are solvers, and programs on abstractions are algorithms.
"""
