"""Numbers and names for people, in one notation."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping

from pipeline.command_line.failures import printable

_GENERIC = re.compile(r"(tokenizer\.\w+(\.v\d+)?|data)$")
"""Last parts of a tokenizer's path that many tokenizers share."""
_DECIMAL_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_count(value: int) -> str:
    """Return an exact count with thousands separators."""
    return f"{value:,}"


def format_plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{format_count(count)} {noun}" + ("" if count == 1 else "s")


def format_short(value: float) -> str:
    """Return a count to three digits with a decimal unit.

    Example:
        >>> format_short(1234567)
        '1.23 M'
    """
    for size, unit in _DECIMAL_UNITS:
        if abs(value) >= 0.9995 * size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{value:,.0f}" if value == int(value) else _three_digits(value)


def format_bytes(value: float) -> str:
    """Return a size in decimal units."""
    text = format_short(value)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def format_share(part: float, whole: float) -> str:
    """Return a part in percent; "n/a" of nothing.

    Example:
        >>> format_share(1, 400)
        '0.25 %'
    """
    return "n/a" if not whole else f"{_percent(100 * part / whole)} %"


def format_ratio(part: float, whole: float) -> str:
    """Return a quotient to three decimals, or "n/a"."""
    return "n/a" if not whole else f"{part / whole:,.3f}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def short_names(*sources: str) -> tuple[str, ...]:
    """Return sources' last specific parts; in full if two would be equal.

    Example:
        >>> short_names("models/llama2/tokenizer.json", "Qwen/Qwen2.5-0.5B/")
        ('llama2', 'Qwen2.5-0.5B')
    """
    parts = [[part for part in source.split("/") if part] for source in sources]
    telling = [[part for part in each if not _GENERIC.match(part)] for each in parts]
    names = tuple((each or [source])[-1] for each, source in zip(telling, sources, strict=True))
    return names if len(set(names)) == len(set(sources)) else sources


def public_name(source: str) -> str:
    """Return a source's name for publishing, without local folders.

    Example:
        >>> public_name("/home/me/models/llama2/tokenizer.json"), public_name("Qwen/Qwen2.5-0.5B")
        ('llama2', 'Qwen/Qwen2.5-0.5B')
    """
    return short_names(source)[0] if source.startswith(("/", "~", ".")) else source


def format_facts(facts: Mapping[str, str]) -> Iterator[str]:
    """Yield names and values, wrapped to a terminal's width.

    Example:
        >>> list(format_facts({"text": "27 kB", "shards": "1"}))
        ['text    27 kB', 'shards  1']
    """
    indent = max(map(len, facts)) + 2
    columns = max(shutil.get_terminal_size((sys.maxsize, 24)).columns - indent, 20)
    for name, value in facts.items():
        lines = textwrap.wrap(printable(value), columns, break_on_hyphens=False) or [""]
        yield printable(f"{name:<{indent}}{lines[0]}")
        yield from (" " * indent + line for line in lines[1:])


def format_table(rows: list[list[str]], *, align: str) -> list[str]:
    """Return a text table; `align` has one of `<` and `>` per column.

    Example:
        >>> format_table([["shard", "tokens"], ["a.tar", "12"]], align="<>")
        ['shard  tokens', 'a.tar      12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _percent(value: float) -> str:
    if value in (0, 100):
        return f"{value:.0f}"
    if 0 < value < 0.0005:
        return "< 0.001"
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"
