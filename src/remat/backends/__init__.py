"""Adapters to solver libraries; each imports its library when it is called."""
