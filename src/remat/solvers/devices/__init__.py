"""What the solvers for several devices are made of."""
