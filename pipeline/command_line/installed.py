"""Find the installed parts of vocag, and how to install the rest."""

import os
import shlex


def installed_version() -> str:
    """Return the version of the installed distribution, set in `setup.cfg`."""
    # Here, because it takes longer than the rest of `vocag --help`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vocag")
    except PackageNotFoundError:
        return "from a checkout that is not installed"


def install(extra: str) -> str:
    """Return the command that installs extras, in the checkout or in a wheel's installation.

    Several are separated by commas; "" is the need of every command. pip asks an index only for the
    extra's packages if vocag itself is installed.
    """
    checkout = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    wanted = f"[{extra}]" if extra else ""
    if not os.path.exists(os.path.join(checkout, "setup.cfg")):
        return f"pip install {shlex.quote('vocag' + wanted)}"
    return f"pip install -e {shlex.quote(checkout + wanted)}"
