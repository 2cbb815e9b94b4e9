"""The only door to what torch keeps private: names, attributes, texts, patches.

May import core; imported by capture, profile, runtime and training, which say what they
need in public words. What is done with it does not belong here.
"""

from remat.torch_compat.self_check import check_installed

check_installed()
