"""Conditions in DuckDB's SQL over a table, checked to be deterministic."""

import json
from collections.abc import Iterable, Iterator, Set
from difflib import get_close_matches
from functools import cache
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.command_line.failures import first_line, hinted
from pipeline.command_line.installed import install

_TABLE, _VALUE = "documents", "value"
_BEFORE = "SELECT ("
_TWO_PARTS = 2
_ALONE: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "threads": "1",
}
_PARTS = frozenset(
    {"BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT",
     "FUNCTION", "OPERATOR", "TYPE"}
)  # fmt: skip
"""Expressions whose value follows from one row. Subqueries may sample; lambdas' parameters, stars
and positions hide the columns they read."""
_CALLED_CONSISTENT = frozenset({"age", "current_localtime", "current_localtimestamp", "version"})
"""Functions consistent for some types to DuckDB, though they read the clock or the release."""
_STABILITIES = ("CONSISTENT", "CONSISTENT_WITHIN_QUERY")


class WhereError(ValueError):
    """A condition is invalid, or matches no document."""


def _refusal(where: str, why: str) -> WhereError:
    return WhereError(f"where {quote(where)}: {why}")


class ConditionQuery:
    """A table for conditions, which can reach nothing else."""

    def __init__(self, table: pa.Table) -> None:
        """Register the table, or raise WhereError without DuckDB.

        A field in a column of structs is named "column".field.
        """
        self._duckdb, database = open_database()
        self._connection = database.cursor()
        self._connection.register(_TABLE, table)
        self._names = {entry.name.lower(): entry.name for entry in table.schema}
        self._paths = {
            (entry.name, own.name)
            for entry in table.schema
            if pa.types.is_struct(entry.type)
            for own in entry.type
        }

    def require_condition(self, where: str) -> frozenset[str]:
        """Return a condition's columns; WhereError if it is invalid or not deterministic.

        Example:
            >>> ConditionQuery(pa.table({"year": [2020]})).require_condition("year > 3")
            frozenset({'year'})
        """
        try:
            columns = self._require_stable(where)
            expression = self._duckdb.SQLExpression(where)
            documents = self._connection.table(_TABLE)
            kind = str(documents.project(expression).types[0])
            documents.filter(expression).fetchall()
        except self._duckdb.Error as error:
            raise _refusal(where, first_line(error)) from error
        if kind != "BOOLEAN":
            raise _refusal(where, f"it is a value of type {kind}, not a condition")
        return columns

    def find_paths(self, where: str) -> list[tuple[int, str, str]]:
        """Return each two-part name of a condition, with its position in bytes.

        Example:
            >>> ConditionQuery(pa.table({"year": [2020]})).find_paths("year > 3 and qwen.rank < 1")
            [(13, 'qwen', 'rank')]
        """
        try:
            self._duckdb.SQLExpression(where)  # refuses several expressions
            parts = list(self._parse(where))
        except self._duckdb.Error as error:
            raise _refusal(where, first_line(error)) from error
        return sorted(
            (part["query_location"] - len(_BEFORE), *part["column_names"])
            for part in parts
            if part["class"] == "COLUMN_REF" and len(part["column_names"]) == _TWO_PARTS
        )

    def decide(self, where: str) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return where a checked condition is true, and where null, bool [N] each.

        WhereError if a value can't be converted.
        """
        try:
            found = self._connection.execute(f"{_BEFORE}{where}\n) AS {_VALUE} FROM {_TABLE}")
            values = found.fetchnumpy()[_VALUE]  # masked if any is null
        except self._duckdb.Error as error:
            raise _refusal(
                where, f"{first_line(error)}; try_cast makes null of what it can't convert"
            ) from error
        if not isinstance(values, np.ma.MaskedArray):
            return values.astype(np.bool_), np.zeros(len(values), np.bool_)
        null: NDArray[np.bool_] = np.zeros(len(values), np.bool_) | values.mask
        return values.filled(False).astype(np.bool_), null

    def _ask(self, query: str, value: str) -> list[Any]:
        rows: list[Any] = self._connection.execute(query, [value]).fetchall()
        return rows

    def _require_stable(self, where: str) -> frozenset[str]:
        """Check a condition and its macros; return its columns."""
        found: set[str] = set()
        waiting, seen = [(str(self._duckdb.SQLExpression(where)), self._names)], set[str]()
        while waiting:
            text, names = waiting.pop()
            parts = list(self._parse(text))
            for part in parts:
                _require_plain(part, where, self._paths)
            columns = {part["column_names"][0] for part in parts if part["class"] == "COLUMN_REF"}
            if unknown := {name for name in columns if name.lower() not in names}:
                raise _unknown_column(where, min(unknown), self._names.values())
            if names is self._names:
                found = {names[name.lower()] for name in columns}
            called = {part["function_name"].lower() for part in parts if "function_name" in part}
            for name in called - seen:
                waiting += self._macros(name, where)
            seen |= called
        return frozenset(found)

    def _parse(self, expression: str) -> Iterator[dict[str, Any]]:
        # On its own line, the parenthesis can't be part of a comment.
        [(text,)] = self._ask("SELECT json_serialize_sql(?)", f"{_BEFORE}{expression}\n)")
        tree = json.loads(text)
        if tree["error"]:
            raise self._duckdb.ParserException(tree["error_message"])
        waiting: list[Any] = [tree["statements"][0]["node"]["select_list"]]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict):
                if "class" in node:
                    yield node
                waiting += node.values()
            elif isinstance(node, list):
                waiting += node

    def _macros(self, name: str, where: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Check a function's stability; yield a macro's definition."""
        rows = self._ask(
            "SELECT stability, macro_definition, parameters FROM duckdb_functions() "
            "WHERE lower(function_name) = ? AND function_type IN ('scalar', 'macro')",
            name,
        )
        if not rows:
            raise _refusal(where, f"{name} isn't a function of one document's values")
        for _, definition, parameters in rows:
            if definition is not None:
                yield definition, {each.lower(): each for each in parameters}
        classes = {stability for stability, definition, _ in rows if definition is None}
        # Since 2.0.1, functions of times with a zone are consistent only within a query, since they
        # read the setting TimeZone, which is UTC here. The clock has no consistent form.
        fixed = "CONSISTENT" in classes and classes <= set(_STABILITIES)
        if classes and (not fixed or name in _CALLED_CONSISTENT):
            raise _refusal(where, f"{name} differs each time, and so would the rows")


def _unknown_column(where: str, unknown: str, names: Iterable[str]) -> WhereError:
    error = _refusal(where, f'column "{unknown}" not found')
    close = get_close_matches(unknown, names, n=1)
    return hinted(error, f"where={quote(where.replace(unknown, close[0]))}") if close else error


@cache
def open_database() -> tuple[Any, Any]:
    """Return DuckDB and a database without files or user settings.

    A connection serves one thread: take a cursor for each query.
    """
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise hinted(WhereError("where needs DuckDB"), install("where")) from error
    connection = duckdb.connect(config=_ALONE)
    # Otherwise a time with a zone depends on the machine. Only ICU has this setting, and needs it.
    if connection.execute("SELECT 1 FROM duckdb_settings() WHERE name = 'TimeZone'").fetchall():
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return duckdb, connection


def _require_plain(part: dict[str, Any], where: str, paths: Set[tuple[str, str]]) -> None:
    kind = part["class"]
    if kind not in _PARTS:
        raise _refusal(
            where,
            f"it holds a {kind.lower().replace('_', ' ')}; a condition is made of "
            "columns, constants, operators and functions",
        )
    # `"column".upper()` parses as a call with the column as its schema.
    schema, last = part.get("schema") or "", part.get("function_name", "")
    path: list[str] = part["column_names"] if kind == "COLUMN_REF" else [last]
    path = [schema, *path] if schema else path
    if len(path) > 1 and (*path[:-1], path[-1].lower()) not in paths:
        name = ".".join(path)
        raise WhereError(
            f'where {where}: column "{name}" not found; put a name with dots in double quotes, and '
            "write f(x) for x.f()"
        )
