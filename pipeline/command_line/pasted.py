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
        return home + slash + (_quoted(rest) if rest else "")
    return _quoted(f"./{path}" if path.startswith("-") else path)


def _quoted(text: str) -> str:
    if text.isprintable():
        return quote(text)
    # As bash and zsh read it: a line end would end a hint, or a comment in run.toml.
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
