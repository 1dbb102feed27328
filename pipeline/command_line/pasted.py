"""Quote paths for a shell."""

from shlex import quote


def pasted(path: str) -> str:
    """Quote a path so that no command takes it for an option, and ~ stays the home folder.

    Example:
        >>> print(pasted("-it's"), pasted("~/a b"))
        './-it'"'"'s' ~/'a b'
    """
    home, slash, rest = path.partition("/")
    if home == "~":
        return home + slash + (quote(rest) if rest else "")
    return quote(f"./{path}" if path.startswith("-") else path)
