"""A schedule becomes executable graphs that run through autograd.

Devices, streams, copies and random state. May import capture; nothing here plans.
"""
