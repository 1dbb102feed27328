"""Command lines from frozen dataclasses: a field is an option, its docstring line the help.

A field's type is str, int, float, Path, bool (False by default), bool | None (with a --no- twin),
Literal, `X | None`, tuple[X, ...] (several values), or a dataclass, whose fields are options, too;
`Annotated` with an `Option` says more.
"""

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pipeline.command_line.failures import causes_of, hinted, report
from pipeline.command_line.option_files import options_text, with_options_of_file


@dataclass(frozen=True)
class Option:
    """How a value is written on a command line.

    `read` makes it from text or raises argparse.ArgumentTypeError. `once` says what to do instead
    of giving the option twice; by default the last one holds. `missing` are lines to choose by if
    it is required but left out; `without` are fields of a held dataclass that aren't options.

    Forms: "named"; "repeated", once per value; "positional"; "rest", unknown arguments; "prefix", a
    dataclass whose options begin with the field's name; "itself", an option named like the holder's
    field: `data: Reading` with `Reading.path` is --data.
    """

    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    form: Literal["named", "repeated", "positional", "rest", "prefix", "itself"] = "named"
    once: str = ""
    missing: str = ""
    without: tuple[str, ...] = ()


Condition = Annotated[str, Option("CONDITION")]
DatasetSource = Annotated[str, Option("DATASET", form="positional")]
Folder = Annotated[str, Option("FOLDER")]
ModelSource = Annotated[str, Option("MODEL")]
TokenName = Annotated[str, Option("TOKEN")]
TokenizerSource = Annotated[str, Option("TOKENIZER")]
Rest = Annotated[tuple[str, ...], Option(form="rest")]

_METAVARS = {int: "N", float: "X", Path: "FILE"}
_QUOTED = re.compile(r""""[^"\n]*"|(?<!\w)'[^'\n]*'(?!\w)""")
_FIRST_HIDDEN = 0xE000  # for private use


def parse_options[T](
    kind: type[T],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    epilog: str = "",
    groups: Mapping[str, str] | None = None,
    with_file: bool = False,
) -> T:
    """Parse a command line; the dataclass's docstring describes the command.

    `groups` maps a group's first option to its title; `with_file` adds --config FILE. The epilog's
    paragraphs with indented lines stay unwrapped.

    Raises:
        ValueError: from the dataclass, or an option given twice against `once`.
        SystemExit: argparse's errors, and --help.
    """
    parser = Parser(**_texts(prog, _summary(kind), epilog))
    add_options(parser, kind, groups=groups)
    if with_file:
        argv = with_options_of_file(parser, argv)
    rest = [entry.name for entry in _entries(kind) if entry.option.form == "rest"]
    parser.knows_all = not rest
    known, unknown = parser.parse_known_args(argv)
    if unknown and not rest:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return read_options(kind, {**vars(known), **dict.fromkeys(rest, unknown)})


def parse_command[T](
    kinds: Mapping[str, type[T]],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    epilog: str,
) -> T:
    """Parse one of several commands; errors as in `parse_options`."""
    parser = Parser(**_texts(prog, description, epilog))
    parser.knows_all = False
    commands = parser.add_subparsers(prog=prog, required=True, metavar="COMMAND", dest="COMMAND")
    for name, kind in kinds.items():
        summary = _summary(kind)
        line = summary.split("\n")[0].replace("%", "%%")
        command = commands.add_parser(name, help=line, **_texts(None, summary, ""))
        add_options(command, kind)
    known, unknown = parser.parse_known_args(argv)
    values = vars(known)
    if unknown:
        commands.choices[known.COMMAND].error(f"unrecognized arguments: {' '.join(unknown)}")
    return read_options(kinds[values.pop("COMMAND")], values)


def written_options(config: Any, *, groups: Mapping[str, str], without: Collection[str]) -> str:
    """Return options, but for those `without`, as --config reads them."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, type(config), groups=groups)
    values = {n: value for n, value in _option_values(config).items() if n not in without}
    return options_text(parser, values)


def add_options(
    parser: argparse.ArgumentParser,
    kind: type,
    *,
    prefix: str = "",
    groups: Mapping[str, str] | None = None,
) -> None:
    """Add a dataclass's options to a parser, required ones first.

    `prefix`, such as "vocag_", begins their names; `groups` as in `parse_options`.
    """
    place: argparse._ActionsContainer = parser
    required = parser.add_argument_group("required")
    parser._action_groups.insert(1, parser._action_groups.pop())  # after values without a name
    for entry in _entries(kind, _Holder(prefix=prefix)):
        if entry.name in (groups or {}):
            place = parser.add_argument_group((groups or {})[entry.name])
        if entry.option.form == "positional":
            optional = {} if entry.default is MISSING else {"nargs": "?", "default": entry.default}
            place.add_argument(entry.name, help=entry.help, **_arguments(entry), **optional)
        elif entry.option.form != "rest":
            needed = entry.default is MISSING
            default = {"required": True} if needed else {"default": entry.default}
            chosen = required if needed else place
            flag, arguments = _flag(entry.name), _arguments(entry) | default
            added: Any = chosen.add_argument(flag, help=entry.help, **arguments)
            added.missing = entry.option.missing


def option_names(kind: type) -> list[str]:
    """Return the options that `add_options` adds."""
    forms = ("positional", "rest")
    return [_flag(entry.name) for entry in _entries(kind) if entry.option.form not in forms]


def read_options[T](kind: type[T], values: Mapping[str, Any], *, prefix: str = "") -> T:
    """Make the dataclass from a parser's values; its ValueErrors name options."""
    with naming_options(kind, prefix=prefix):
        return _build(kind, values, _Holder(prefix=prefix))


@contextmanager
def naming_options(
    kind: type,
    *,
    prefix: str = "",
    others: Sequence[str] = (),
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> Iterator[None]:
    """Let errors name options where libraries name fields.

    `others` are fields that are options without the prefix.
    """
    try:
        yield
    except errors as error:
        if len(error.args) == 1:  # unless its class makes the message
            error.args = (in_options(str(error), kind, prefix=prefix, others=others),)
        for each in causes_of(error):
            notes = getattr(each, "__notes__", [])
            notes[:] = [in_options(note, kind, prefix=prefix, others=others) for note in notes]
        raise


def in_options(text: str, kind: type, *, prefix: str = "", others: Sequence[str] = ()) -> str:
    """Write a text's fields as options: `top_k=2` as --top-k 2, `quiet=True` as --quiet.

    What is in quotes is a user's.
    """
    quoted: list[str] = []

    def hide(found: re.Match[str]) -> str:
        quoted.append(found[0])
        return chr(_FIRST_HIDDEN + len(quoted) - 1)

    text = _QUOTED.sub(hide, text)
    names = [entry.name for entry in _entries(kind, _Holder(prefix=prefix))]
    for name in (*names, *others):
        field = name if name in others else name.removeprefix(prefix)
        word = rf"(?<![\w/.-]){field}"
        text = re.sub(rf"{word}=True\b", _flag(name), text)
        text = re.sub(rf"{word}=(?=[^\s,;:)])", f"{_flag(name)} ", text)
        text = re.sub(rf"{word}=", _flag(name), text)
        if "_" in field:  # else it may be an ordinary word
            text = re.sub(rf"{word}(?![\w/.])", _flag(name), text)
    for number, own in enumerate(quoted):
        text = text.replace(chr(_FIRST_HIDDEN + number), own)
    return text


def require_known(
    option: str, given: Iterable[str], known: Collection[str], *, or_else: str = ""
) -> None:
    """Raise ValueError for unknown values, hinting at a similar one.

    `option` precedes a value, as in `--tasks ` or `method=`; `or_else` ends the known ones.
    """
    if unknown := [str(name) for name in given if name not in known]:
        choices = ", ".join([*known, *filter(None, [or_else])])
        error = ValueError(f"{option}{' '.join(unknown)}: choose one of {choices}")
        like = get_close_matches(unknown[0], known, 1)
        raise hinted(error, like[0]) if like else error


def require_least(options: object, *names: str, least: int = 1) -> None:
    """Raise ValueError for a field below `least`; None passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: it must be at least {least}")


@dataclass(frozen=True)
class _Entry:
    """A field as an option; `hint` is its type without `| None` and `Annotated`."""

    name: str
    hint: Any
    option: Option
    default: Any
    text: str

    @property
    def help(self) -> str:
        """The docstring's line, with the default."""
        text, default = self.text.rstrip("."), self.default
        told = "(default: " in text or default in (MISSING, None, "", ()) or default is False
        if not told:
            values = default if isinstance(default, tuple) else (default,)
            text += f" (default: {' '.join(map(str, values))})"
        return text.replace("%", "%%")


@dataclass(frozen=True)
class _Holder:
    """The field that holds a dataclass, and its options' prefix."""

    name: str = ""
    option: Option = Option()
    prefix: str = ""

    def of(self, name: str, option: Option) -> "_Holder":
        return _Holder(name, option, f"{name}_" if option.form == "prefix" else self.prefix)


_NOBODY = _Holder()


def _named_fields(kind: type, holder: _Holder) -> Iterator[tuple[Field[Any], str, Any, Option]]:
    hints = get_type_hints(kind, include_extras=True)
    for entry in fields(kind):
        hint, option = _unwrap(hints[entry.name])
        name = holder.prefix + entry.name
        if option.form == "itself":
            name = holder.name or name
            positional = holder.option.form == "positional"
            option = replace(option, form="positional" if positional else "named")
        yield entry, name, hint, option


def _entries(kind: type, holder: _Holder = _NOBODY, taken: Sequence[str] = ()) -> Iterator[_Entry]:
    """Yield all options of a dataclass; a shared name is one option."""
    texts = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(kind) or "", re.M))
    named = list(_named_fields(kind, holder))
    own = [name for _, name, hint, _ in named if not is_dataclass(hint)]
    for entry, name, hint, option in named:
        if is_dataclass(hint):
            yield from _entries(cast(type, hint), holder.of(name, option), own)
        elif name not in taken and entry.name not in holder.option.without:
            text = " ".join(texts.get(entry.name, "").split())
            yield _Entry(name, hint, option, entry.default, text)


def _unwrap(hint: Any) -> tuple[Any, Option]:
    if get_origin(hint) is Annotated:
        inner, *_, option = get_args(hint)  # the outermost mark: nested ones are flattened
        return _unwrap(inner)[0], option
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not NoneType]
        several = [part for part in parts if get_origin(part) is tuple]
        parts = several or parts  # one value is several of one
        choices = [choice for part in parts for choice in get_args(part)]
        return _unwrap(parts[0]) if len(parts) == 1 else (Literal[*choices], Option())
    return hint, Option()


def _arguments(entry: _Entry) -> dict[str, Any]:
    hint, option = entry.hint, entry.option
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction if entry.default is None else "store_true"}
    if get_origin(hint) is Literal and option.read is None:
        # A program gives "" if a user leaves the option out.
        return {"choices": [choice for choice in get_args(hint) if choice]}
    several: dict[str, Any] = {}
    if get_origin(hint) is tuple:
        hint, inner = _unwrap(get_args(hint)[0])
        option = option if option.metavar else inner
        several = {"action": "append"} if option.form == "repeated" else {"nargs": "+"}
    elif option.once:
        several = {"action": _Once, "const": option.once}
    metavar = option.metavar or _METAVARS.get(hint)
    read = option.read or (_path if hint is Path else hint)
    return {"type": read, "metavar": metavar, **several}


def _path(value: str) -> Path:
    if not value:  # the current folder, for pathlib
        raise argparse.ArgumentTypeError("it is empty; name a path")
    return Path(value)


def _build[T](kind: type[T], values: Mapping[str, Any], holder: _Holder) -> T:
    given: dict[str, Any] = {}
    for entry, name, hint, option in _named_fields(kind, holder):
        if is_dataclass(hint):
            given[entry.name] = _build(cast(type, hint), values, holder.of(name, option))
        elif entry.name not in holder.option.without:
            value = values[name]
            given[entry.name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def _option_values(config: Any, holder: _Holder = _NOBODY) -> dict[str, Any]:
    held: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for entry, name, hint, option in _named_fields(type(config), holder):
        value = getattr(config, entry.name)
        if is_dataclass(hint):
            held |= _option_values(value, holder.of(name, option))
        else:
            own[name] = value
    return held | own


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\nAttributes:")[0]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _texts(prog: str | None, description: str, epilog: str) -> dict[str, Any]:
    texts = {"prog": prog, "description": description, "epilog": epilog}
    return {**texts, "formatter_class": _HelpFormatter, "allow_abbrev": False}


class Parser(argparse.ArgumentParser):
    """Reports the error and a remedy; argparse would print every option first.

    `knows_all` is False if another parser reads the options that this one doesn't know.
    """

    given: Sequence[str] = ()
    knows_all = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep what was given."""
        self.given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse would hide that a full disk refuses it."""
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except OSError as error:
            report(self.prog, error)
            self.exit(1)

    def error(self, message: str) -> NoReturn:
        """Print the error, what is missing, and a hint; exit with 2."""
        names = [argument.partition("=")[0] for argument in self.given]
        known: Collection[str] = self._option_string_actions
        unknown = [name for name in names if re.match(r"--\w", name) and name not in known]
        meant: Collection[str] = ()
        lines = ""
        if message.startswith("unrecognized arguments"):
            meant = known
        elif message.startswith("the following arguments are required"):
            missing = re.findall(r"--[\w-]+", message)  # one of them may be given, misspelt
            lines = "".join(map(self._lines_of_missing, missing))
            meant = known if self.knows_all else missing
            unknown = [n for n in unknown if self.knows_all or get_close_matches(n, missing)]
            message += f"; unrecognized arguments: {' '.join(unknown)}" if unknown else ""
        elif choice := re.search(r"invalid choice: '(.+)' \(choose from (.+)\)", message):
            unknown, meant = [choice[1]], re.findall(r"[^\s,']+", choice[2])
        close = [best for name in unknown for best in get_close_matches(name, meant, 1)]
        hint = " ".join(dict.fromkeys(close)) or f"{self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}\n{lines}hint: {hint}\n")

    def _lines_of_missing(self, name: str) -> str:
        """Return what a required option means, or lines to choose by."""
        option = self._option_string_actions[name]
        told = f"{name} {option.metavar or ''}".rstrip() + f": {option.help}".replace("%%", "%")
        lines = (getattr(option, "missing", "") or told).splitlines()
        return "".join(f"  {line}\n" for line in lines)


class _Once(argparse.Action):
    given = False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.given:
            raise ValueError(f"{option_string} is given twice; {self.const}")
        self.given = True
        setattr(namespace, self.dest, values)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps prose to the terminal, but not paragraphs with indented lines."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        """Show only required options."""
        options = argparse.Action([], "options", metavar="[options]")
        needed = [each for each in actions if each.required or not each.option_strings]
        super().add_usage(usage, [options, *needed], groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            block if re.search(r"^ ", block, re.M) else textwrap.fill(block, width)
            for block in text.strip().split("\n\n")
        )
