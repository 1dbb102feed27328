"""The `vocag` command's start, which checks that our packages are found."""

import sys

from vocag.own_packages import HiddenPackageError, require_own_packages

TYPE_CHECKING = False  # typing's own, whose import takes as long as the rest of `vocag --help`
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Run `vocag COMMAND …` and end the process with its status."""
    try:
        require_own_packages()
    except HiddenPackageError as error:
        print(f"vocag: error: {error}", file=sys.stderr)
        sys.exit(2)
    from pipeline.command_line.commands import main

    main()
