"""Files: documents of graphs, platforms, schedules and plans, with versions.

May import core. What is in a plan, or how it is judged, does not belong here.
"""
