"""What everything else talks about: graphs, platforms, schedules, problems, the judge.

Knows no room of this package but itself, and neither torch nor a solver. How a schedule
is found does not belong here.
"""
