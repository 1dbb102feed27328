"""A command's options in a TOML file: the words of its command line, without the dashes.

method = "distill"
seq-length = 2048
stored-losses = ["1.5B", "7B"]
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.command_line.failures import hinted
from pipeline.command_line.pasted import pasted

_OPTION = "--config"


def with_options_of_file(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> Sequence[str]:
    """Add --config FILE to a parser; put the file's options before the command line's.

    Raises:
        ValueError: the file isn't TOML, or names what isn't an option.
        OSError: it can't be read.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser.add_argument(
        _OPTION,
        metavar="FILE",
        help="read options from a file, such as another run's run.toml; those of the command line "
        "come after the file's and replace them, and --no-NAME turns a switch of the file off",
    )
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            off = "--no-" + action.option_strings[0].removeprefix("--")
            parser.add_argument(
                off, dest=action.dest, action="store_false", default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip
    path = ""  # the last one given holds; without its file, the parser says what is wrong
    for word, following in pairwise([*argv, ""]):
        option, separator, value = word.partition("=")
        if option == _OPTION:
            path = value if separator else following
    return [*_arguments_of(Path(path), parser), *argv] if path else argv


def options_text(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> str:
    """Write a command's options as such a file, in the order of its help."""
    lines = []
    for group in parser._action_groups:
        written = [
            f"{action.option_strings[0].removeprefix('--')} = {_toml(values[action.dest])}"
            for action in group._group_actions
            if _is_said(values.get(action.dest), action.default)
        ]
        lines += ["", f"# {group.title}", *written] if written else []
    return "\n".join([*lines, ""])


def _arguments_of(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    import tomllib  # only if there is a file

    try:
        options = tomllib.loads(path.read_text("utf-8"))
    except IsADirectoryError as error:
        refusal = ValueError(f"{path} is a folder, and {_OPTION} reads a file")
        raise hinted(refusal, f"{_OPTION} {pasted(str(path / 'run.toml'))}") from error
    except ValueError as error:
        raise ValueError(f"{path} isn't a TOML file: {error}") from error
    known = {
        option.removeprefix("--"): action
        for option, action in parser._option_string_actions.items()
        if option not in ("-h", "--help", _OPTION) and action.help != argparse.SUPPRESS
    }
    for name, value in options.items():
        if name not in known:
            like = get_close_matches(name.replace("_", "-"), known, 1)
            message = f"{path}: {name} isn't an option of {parser.prog}"
            raise hinted(ValueError(message), like[0] if like else f"{parser.prog} --help")
        yield from _arguments(name, value, known[name], path)


def _arguments(name: str, value: Any, action: argparse.Action, path: Path) -> Iterator[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {name} is true or false, not {value!r}")
        twin = isinstance(action, argparse.BooleanOptionalAction)
        yield from [f"--{name}"] if value else ["--no-" + name] if twin else []
    elif isinstance(value, bool | dict):
        raise ValueError(f"{path}: {name} is {value!r}, and takes a number, a text or a list")
    elif isinstance(value, list) and len(value) != 1:  # one may begin with a dash
        yield from (f"--{name}", *map(str, value))
    else:
        yield f"--{name}={value[0] if isinstance(value, list) else value}"


def _is_said(value: Any, default: Any) -> bool:
    return value is not None and value != () and not (value == "" == default)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # JSON's escapes are TOML's, but for one character that TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", r"\u007f")
