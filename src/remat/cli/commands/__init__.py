"""The subcommands, one file each, and the explicit tuple of them."""

from remat.cli.base import Command
from remat.cli.commands.cache import CACHE
from remat.cli.commands.check import CHECK
from remat.cli.commands.curve import CURVE
from remat.cli.commands.fit import FIT
from remat.cli.commands.instances import INSTANCES
from remat.cli.commands.plan import PLAN
from remat.cli.commands.profile_platform import PROFILE_PLATFORM
from remat.cli.commands.show import SHOW
from remat.cli.commands.verify import VERIFY

COMMANDS: tuple[Command, ...] = (
    FIT,
    PLAN,
    VERIFY,
    SHOW,
    CHECK,
    CURVE,
    PROFILE_PLATFORM,
    CACHE,
    INSTANCES,
)
