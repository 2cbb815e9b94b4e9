"""Capture: from a traced module to a training graph; the only place that knows tracing."""
