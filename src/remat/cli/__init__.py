"""The ``remat`` command."""

from remat.cli.entry import main as main
