"""What is called with a model: fit, plan, verify, release and the backend.

The conductor, which calls capture, profile, planning and runtime in that order. Nothing
below imports it; of this package only the command line does.
"""
