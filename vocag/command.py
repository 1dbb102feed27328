"""Where the `vocag` command starts: our packages are found first, or what hides them is named."""

import sys

from vocag.own_packages import HiddenPackageError, require_own_packages

TYPE_CHECKING = False  # typing's own, whose import takes as long as the rest of `vocag --help`
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Run the command line, `vocag COMMAND …`, and end the process with its status."""
    try:
        require_own_packages()
    except HiddenPackageError as error:
        print(f"vocag: error: {error}", file=sys.stderr)
        sys.exit(2)
    from pipeline.command_line.command import main

    main()
