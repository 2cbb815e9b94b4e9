"""From a training graph to the abstraction of a method, and back.

Each module derives one abstraction from a training graph and *lifts* an answer back to
an order of the graph's own ops, where the judge recomputes cost and peak. May import
algorithms, search and what they import; which answer is taken is a solver's choice.
"""
