"""Runtime: a schedule becomes two graphs that run through autograd."""
