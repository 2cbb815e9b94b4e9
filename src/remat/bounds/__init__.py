"""Proved lower bounds on the time and the memory of every schedule on one device.

Knows `core`, and `backends` for linear programs whose answers it does not trust. No
solver, search or plan is known here: a bound owes nothing to what it judges.
"""
