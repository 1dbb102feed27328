"""Find a user's file that hides one of our packages.

A `pipeline.py` or `schemas/` in the current folder or on PYTHONPATH hides ours. So their first
importers, which include `beam_jobs` (Beam's workers) and `megatron_plugin` (torchrun), call this
module, which imports none of them.
"""

import os
import sys

PACKAGES = ("schemas", "pipeline", "beam_jobs", "megatron_plugin")


class HiddenPackageError(ImportError):
    """Something else with the name of one of our packages is found first."""


def require_own_packages() -> None:
    """Check that our packages are those next to this one.

    Raises:
        HiddenPackageError: it names both files and the remedy.
    """
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in PACKAGES:
        found = _find(name)
        if found is not None and os.path.dirname(found) != os.path.realpath(ours):
            raise HiddenPackageError(_explain(name, found))
        if found is not None and not _is_ours(found):
            raise HiddenPackageError(_explain_overwritten(name, found))


def _find(name: str) -> str | None:
    """Return a package's file or folder, links resolved."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    # As importlib.util.find_spec, whose import takes longer than everything else here.
    finders = iter(sys.meta_path)
    while spec is None and (finder := next(finders, None)) is not None:
        spec = finder.find_spec(name, None)
    if spec is None:
        return None  # a part that is not installed
    places = list(spec.submodule_search_locations or [])
    return os.path.realpath(places[0] if places else spec.origin or name)


def _is_ours(package: str) -> bool:
    """Whether a package's first file is ours: another distribution may have replaced it."""
    try:
        with open(os.path.join(package, "__init__.py"), encoding="utf-8") as file:
            return "vocag" in file.read()
    except (OSError, UnicodeDecodeError):
        return False


def _explain_overwritten(name: str, found: str) -> str:
    from importlib.metadata import packages_distributions  # slow, and seldom needed

    others = sorted({*packages_distributions().get(name, ())} - {"vocag"})
    other = others[0] if others else "another distribution"
    uninstall = f"pip uninstall {other} && " if others else ""
    return (
        f'{other} has put its own __init__.py into {found}, vocag\'s package "{name}": use an '
        f"environment for each, or {uninstall}pip install --force-reinstall --no-deps vocag"
    )


def _explain(name: str, found: str) -> str:
    folder = os.path.dirname(found)
    if folder == os.path.realpath(sys.path[0] or os.getcwd()) and not sys.flags.safe_path:
        remedy = "start python with -P, so that it doesn't look there, or rename it"
    elif folder == os.path.realpath(os.getcwd()):
        remedy = "rename it, or run the command in another folder"
    else:
        remedy = f"rename it, or take {folder} off PYTHONPATH"
    return f'{found} hides vocag\'s own package "{name}": {remedy}'
