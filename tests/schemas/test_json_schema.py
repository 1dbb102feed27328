"""The JSON Schema is what the records say, and refuses what reading refuses."""

import json

from schemas.json_schema import FILE, encode_schema, manifest_schema


def test_the_file_is_current() -> None:
    assert FILE.read_bytes() == encode_schema(), "run python -m schemas.json_schema"


def test_every_field_is_described() -> None:
    schema = manifest_schema()
    records = [schema, *schema["$defs"].values()]
    assert len(records) == 8
    for record in records:
        assert record["description"]
        assert all(field["description"] for field in record["properties"].values())
    assert "None" not in json.dumps(schema)
