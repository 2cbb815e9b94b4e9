"""Published training graphs with budgets, and the best that is known of each.

Reads, judges and compares; finds no schedules. May import planning, and never torch:
anybody's schedule can be judged where no model is.
"""
