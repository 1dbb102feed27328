"""`manifest.schema.json`, made from the records: `python -m schemas.json_schema` writes it anew.

Types and bounds are the fields' own; descriptions are the classes' docstrings.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from schemas.manifest import (
    FORMAT,
    ConventionRecord,
    DeadLetterRecord,
    GenerationRecord,
    Manifest,
    ManifestClaims,
    MetadataColumn,
    RemovedRecord,
    ShardRecord,
    TokenizerRecord,
)

FILE = Path(__file__).with_name("manifest.schema.json")

_RECORDS = (ConventionRecord, DeadLetterRecord, GenerationRecord, Manifest, ManifestClaims,
            MetadataColumn, RemovedRecord, ShardRecord, TokenizerRecord)  # fmt: skip
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema of `manifest.json`.

    Example:
        >>> manifest_schema()["$id"]
        'vocag.aligned_dataset.v2'
    """
    definitions: dict[str, Any]
    _, definitions = msgspec.json.schema_components(_RECORDS, ref_template="#/$defs/{name}")
    for kind in _RECORDS:
        _describe(definitions[kind.__name__], kind)
    claims, body = definitions.pop("ManifestClaims"), definitions.pop("Manifest")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{FORMAT.name}.v{FORMAT.version}",
        "title": f"vocag aligned dataset, manifest up to version {FORMAT.version}",
        "description": "What a dataset holds. Written last: a folder without a manifest is "
        "unfinished. Paths are relative to the manifest. A reader ignores fields that it does not "
        "know.",
        "type": "object",
        "required": [*claims["required"], *body["required"], "schema_version"],
        "properties": claims["properties"] | body["properties"],
        "$defs": definitions,
    }


def encode_schema() -> bytes:
    """Return the bytes of `manifest.schema.json`."""
    return (json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n").encode()


def _describe(definition: dict[str, Any], kind: type[Any]) -> None:
    """Put a docstring's first line and what it says of each field into a record's schema."""
    text = inspect.getdoc(kind) or ""
    definition["description"] = text.partition("\n")[0]
    for name, words in _ATTRIBUTE.findall(text):
        in_json = re.sub(r"\bNone\b", "null", " ".join(words.split()))
        definition["properties"][name]["description"] = in_json
    for entry in definition["properties"].values():
        if entry.pop("default", ...) is None:  # what is None here is absent there
            entry["anyOf"] = [choice for choice in entry["anyOf"] if choice != {"type": "null"}]


def main() -> None:
    """Write the file."""
    FILE.write_bytes(encode_schema())


if __name__ == "__main__":
    main()
