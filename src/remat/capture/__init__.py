"""A torch program becomes a training graph.

Tracing, and what is rewritten of the traced program, are known only here. May import
planning and what is below it; what an op costs belongs to profile.
"""
