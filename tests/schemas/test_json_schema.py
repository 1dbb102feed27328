"""`manifest.schema.json` is what the records say.

`python -m tests.schemas.test_json_schema` writes it anew. Types and bounds are the fields' own;
descriptions are the classes' docstrings.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from schemas import manifest

FILE = Path(manifest.__file__).with_name("manifest.schema.json")
RECORDS = [
    kind
    for _, kind in sorted(vars(manifest).items())
    if inspect.isclass(kind) and kind.__module__ == manifest.__name__
]
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


def manifest_schema() -> dict[str, Any]:
    _, definitions = msgspec.json.schema_components(RECORDS, ref_template="#/$defs/{name}")
    for kind in RECORDS:
        describe(definitions[kind.__name__], kind)
    claims, body = definitions.pop("ManifestClaims"), definitions.pop("Manifest")
    known = manifest.FORMAT
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{known.name}.v{known.version}",
        "title": f"vocag aligned dataset, manifest up to version {known.version}",
        "description": "What a dataset holds. Written last: a folder without a manifest is "
        "unfinished. Paths are relative to the manifest. A reader ignores fields that it does not "
        "know.",
        "type": "object",
        "required": [*claims["required"], *body["required"], "schema_version"],
        "properties": claims["properties"] | body["properties"],
        "$defs": definitions,
    }


def describe(definition: dict[str, Any], kind: type[Any]) -> None:
    """Put a docstring's first line and what it says of each field into a record's schema."""
    text = inspect.getdoc(kind) or ""
    definition["description"] = text.partition("\n")[0]
    for name, words in ATTRIBUTE.findall(text):
        in_json = re.sub(r"\bNone\b", "null", " ".join(words.split()))
        definition["properties"][name]["description"] = in_json
    for entry in definition["properties"].values():
        assert entry["description"]
        if entry.pop("default", ...) is None:  # what is None here is absent there
            entry["anyOf"] = [choice for choice in entry["anyOf"] if choice != {"type": "null"}]


def encoded() -> str:
    return json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"


def test_the_file_is_current() -> None:
    assert FILE.read_text("utf-8") == encoded()


if __name__ == "__main__":
    FILE.write_text(encoded(), "utf-8")
