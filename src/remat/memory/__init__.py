"""What an allocator makes of a plan's requests: reserved bytes, segments, layouts.

Models of allocators, the requests that a schedule makes of one, and recorded requests
of real runs. May import core and native; knows no solver and no torch.
"""
