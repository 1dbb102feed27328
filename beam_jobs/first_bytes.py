"""Recognise a file by its first bytes."""

import re

HEAD_BYTES = 512
"""Enough for a tar archive's mark, which ends at byte 263."""

COMPRESSIONS = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # or a skippable frame
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
}
_OTHERS = {
    "a tar archive": re.compile(rb"[^\0].{256}ustar[\0 ]", re.DOTALL),
    "a zip archive": re.compile(rb"PK\x03\x04"),
    "a 7z archive": re.compile(rb"7z\xbc\xaf\x27\x1c"),
    "lz4": re.compile(rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18"),
    "snappy": re.compile(rb"\xff\x06\0\0sNaPpY"),
    "compress (.Z)": re.compile(rb"\x1f\x9d"),
}
_UNICODE = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff"),  # begins as UTF-16 does
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff"),
}
_NOT_TEXT = re.compile(r"[\0-\x08\x0e-\x1f\x7f]")


def compression_of(head: bytes) -> str | None:
    """Compression of a file, or None.

    Example:
        >>> compression_of(b"BZh91AY&SY"), compression_of(b"BZh, a text")
        ('bzip2', None)
    """
    return _match(COMPRESSIONS, head)


def unreadable_kind_of(head: bytes) -> str | None:
    """Unsupported kind of a file, or None."""
    return _match(_OTHERS, head)


def is_plain_text(head: bytes) -> bool:
    """Whether bytes can only be UTF-8, perhaps cut within a character.

    False below ten bytes, which may begin bzip2.
    """
    text = head[:HEAD_BYTES].decode(errors="replace").rstrip("\ufffd")
    return len(head) >= 10 and "\ufffd" not in text and not _NOT_TEXT.search(text)


def why_not_utf8(head: bytes) -> str | None:
    """Remedy for a UTF-16 or UTF-32 mark at the start, or None."""
    name = _match(_UNICODE, head)
    return name and f"it is {name}, not UTF-8: convert it, such as iconv -f {name} -t UTF-8"


def _match(kinds: dict[str, re.Pattern[bytes]], head: bytes) -> str | None:
    return next((name for name, start in kinds.items() if start.match(head)), None)
