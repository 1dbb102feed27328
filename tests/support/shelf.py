"""A store of Beam's alone: `shelf://FOLDER/…` is a local file that fsspec can't find."""

from collections.abc import Iterator
from typing import Any

from apache_beam.io.filesystem import FileMetadata, FileSystem
from apache_beam.io.localfilesystem import LocalFileSystem

SCHEME = "shelf"
_PREFIX = f"{SCHEME}://"


class ShelfFileSystem(LocalFileSystem):
    """Beam's own file system of local files, under another scheme."""

    @classmethod
    def scheme(cls) -> str:
        return SCHEME

    def has_dirs(self) -> bool:
        return False

    def join(self, basepath: str, *paths: str) -> str:
        return "/".join([basepath.rstrip("/"), *paths])

    def split(self, path: str) -> tuple[str, str]:
        head, _, tail = path.rpartition("/")
        return head, tail

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        folder = _local(dir_or_prefix).rpartition("/")[0]  # a prefix may end within a name
        for found in super()._list(folder):
            yield FileMetadata(_PREFIX + found.path, found.size_in_bytes)

    def match(self, patterns: list[str], limits: list[int | None] | None = None) -> Any:
        return FileSystem.match(self, patterns, limits)

    def open(self, path: str, *arguments: Any, **keywords: Any) -> Any:
        return super().open(_local(path), *arguments, **keywords)

    def exists(self, path: str) -> bool:
        return super().exists(_local(path))

    def delete(self, paths: list[str]) -> None:
        super().delete([*map(_local, paths)])

    def metadata(self, path: str) -> FileMetadata:
        found = super().metadata(_local(path))
        return FileMetadata(path, found.size_in_bytes)

    def checksum(self, path: str) -> str:
        return super().checksum(_local(path))


def _local(path: str) -> str:
    return path.removeprefix(_PREFIX)
