"""One argument for a training framework: one module for each.

Each turns what its framework says (optimizer, accumulation, what is around the model)
into a call of ``remat.training``. A framework is imported by the module of its name
alone, and ``import remat`` imports none of them. Nothing here plans or runs a step, and
nobody imports it.
"""
