"""What of vocag is installed here, and how to install the rest."""

import os
import shlex


def installed_version() -> str:
    """Return vocag's version, which `setup.cfg` says, as the installed distribution has it."""
    # Here, because it takes longer than the rest of `vocag --help`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vocag")
    except PackageNotFoundError:
        return "from a checkout that is not installed"


def install(extra: str) -> str:
    """Return the command that installs extras, in the checkout or in a wheel's installation.

    Several have commas between them; "" is what every command needs. pip asks an index for the
    extra's packages alone if vocag itself is installed.
    """
    checkout = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    wanted = f"[{extra}]" if extra else ""
    if not os.path.exists(os.path.join(checkout, "setup.cfg")):
        return f"pip install {shlex.quote('vocag' + wanted)}"
    return f"pip install -e {shlex.quote(checkout + wanted)}"
