"""The papers' programs, on their own abstractions: chains, joins and lower sets.

May import search, core and native. Nothing here knows a training graph's ops; what
becomes of an answer there is the work of reductions.
"""
