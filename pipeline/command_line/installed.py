"""The installed parts of vocag, and how to install the rest."""

import os
import shlex


def installed_version() -> str:
    """Return the installed distribution's version."""
    # Here, because it takes longer than the rest of `vocag --help`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vocag")
    except PackageNotFoundError:
        return "from a checkout that is not installed"


def install(extra: str) -> str:
    """Return the command that installs extras, in a checkout or from an index.

    Several are separated by commas; "" installs what every command needs.
    """
    checkout = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    wanted = f"[{extra}]" if extra else ""
    if not os.path.exists(os.path.join(checkout, "setup.cfg")):
        return f"pip install {shlex.quote('vocag' + wanted)}"
    return f"pip install -e {shlex.quote(checkout + wanted)}"
