"""The methods of training, each in one file, with its loss.

To add one, write a file with its `KINDS` and name it here; users name theirs by `--method
package.module`. A new way to rank tokens is a selector of `pipeline.guidance.selection`. Only a
loss imports torch: options and help don't need it.
"""

from dataclasses import fields
from importlib import import_module

from pipeline.command_line.option_parsing import require_known
from pipeline.methods import alm, chunks, distill, kld, rho1, selected_tokens, uld
from pipeline.methods.kind import MethodKind
from pipeline.methods.method import Method

_FAMILIES = (
    *(selected_tokens.KINDS, alm.KINDS, distill.KINDS),
    *(kld.KINDS, uld.KINDS, rho1.KINDS, chunks.KINDS),
)
_CHOOSING = ("keep_fraction", "unmapped", "scope", "aggregation", "expectation")
METHODS = {kind.name: kind for kinds in _FAMILIES for kind in kinds}


def kind_of(method: Method) -> MethodKind:
    """Return the kind of a method.

    Raises:
        ValueError: no Method, an unknown name or module, too large a weight, or an option that the
            method doesn't read.
        ImportError: a user's module can't import what it needs.
    """
    if not isinstance(method, Method):
        raise ValueError(f"method {method!r} isn't a Method: give Method({method!r})")
    if "." not in method.name:
        require_known("method=", [method.name], METHODS, or_else="or name your own package.module")
    kind = METHODS.get(method.name) or _foreign(method.name)
    given = [each.name for each in fields(method) if getattr(method, each.name) != each.default]
    for option in given:
        if option in _CHOOSING and not kind.chooses_by(method):
            raise ValueError(
                f"{option}={getattr(method, option)} is for methods that choose tokens, and "
                f"method={kind.name} learns all{_with_options(kind)}: leave it out"
            )
        if option in kind.unread_by(method):
            by = f" by distill_by={method.distill_by}" if method.distill_by else ""
            raise ValueError(
                f"{option}={getattr(method, option)} changes nothing with method={kind.name}{by}: "
                "leave it out"
            )
        readers = [other.name for other in METHODS.values() if option in other.options]
        if readers and option not in kind.options:
            raise ValueError(
                f"{option}={getattr(method, option)} is for method={' and '.join(readers)}: leave "
                f"it out with {kind.name}"
            )
    if kind.weight_of(method) > kind.largest_weight:
        raise ValueError(
            f"weight={method.weight} must be at most {kind.largest_weight:g} with "
            f"method={kind.name}: the rest is cross entropy's"
        )
    return kind


def _with_options(kind: MethodKind) -> str:
    return " with distill_tokens=all" if kind.chooses else ""


def _foreign(name: str) -> MethodKind:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # one that the module imports
        raise ValueError(
            f"method={name}: Python finds no module {error.name}; a file of your own is found in "
            "the folders that PYTHONPATH names"
        ) from error
    kinds: tuple[object, ...] = getattr(module, "KINDS", ())
    if len(kinds) != 1 or not isinstance(kinds[0], MethodKind):
        raise ValueError(f"method={name}: that module's KINDS must hold one MethodKind")
    return kinds[0]
