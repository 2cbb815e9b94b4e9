"""A package, so that tests can share code: ``from tests.oracles import replay``."""
