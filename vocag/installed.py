"""What of vocag is installed here, and how to install the rest."""


def installed_version() -> str:
    """Return vocag's version, which `setup.cfg` says, as the installed distribution has it.

    Example:
        >>> installed_version()  # doctest: +SKIP
        '0.1.0'
    """
    # Here, because it takes longer than the rest of `vocag --help`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vocag")
    except PackageNotFoundError:
        return "from a checkout that is not installed"


def install(extra: str) -> str:
    """Return how to install an extra: from a checkout, because no package is published.

    Without a name it is what every command needs.

    Example:
        >>> install("hf")
        "pip install -e '.[hf]' in the checkout"
    """
    wanted = f"'.[{extra}]'" if extra else "."
    return f"pip install -e {wanted} in the checkout"
