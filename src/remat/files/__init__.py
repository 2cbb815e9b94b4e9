"""Files: documents of graphs, platforms, schedules and plans, with versions.

What a file holds is declared as types, and msgspec converts to them. May import core.
What is in a plan, or how it is judged, does not belong here.
"""
