"""Capture: from a traced module to a training graph; tracing is known only here."""
