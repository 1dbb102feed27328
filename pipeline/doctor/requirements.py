"""Requirements of the installed distribution.

In a bare checkout, everything here raises `PackageNotFoundError`.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement  # huggingface_hub brings it


def extras() -> list[str]:
    """Return the names of vocag's extras."""
    return sorted(metadata("vocag").get_all("Provides-Extra") or [])


def missing(extra: str = "") -> list[str]:
    """Return unmet requirements of an extra, or of every command if ""."""
    return list(dict.fromkeys(_unmet("vocag", extra)))


def library_versions() -> dict[str, str | None]:
    """Return the versions of all libraries; None if not installed."""
    names = {Requirement(line).name for line in requires("vocag") or ()} - {"vocag"}
    return {name: _version(name) for name in sorted(names)}


def _unmet(package: str, extra: str) -> Iterator[str]:
    for line in requires(package) or ():
        need = Requirement(line)
        core, wanted = (
            need.marker is None or need.marker.evaluate({"extra": name}) for name in ("", extra)
        )
        if not wanted or (extra and core):
            continue
        found = _version(need.name)
        if found is None:
            yield f"{need.name}{need.specifier} (not installed)"
            continue
        if not need.specifier.contains(found, prereleases=True):
            yield f"{need.name}{need.specifier} ({found} is installed)"
        for each in sorted(need.extras):
            yield from _unmet(need.name, each)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
