"""Graph and budgets in, plan out: portfolio, one device, several devices, curve.

May import solvers and everything below them, and never torch: whatever is planned can
be planned where the model is not. How a plan is installed belongs to training.
"""
