"""Several processes, each with its part of a step."""
