"""`--append`: which dataset may grow by which input, and what names such a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from beam_jobs.errors import OptionsError
from beam_jobs.generations import read_newest
from beam_jobs.runs import Describe, require_all_files
from schemas.manifest import Manifest

_APPEND_TO = "append_to"
_OF_THE_INPUT = {
    *("input_files", "input_bytes", "input_sha256", "format", "overlap_sha256"),
    *("input_dataset", "input_generation", "input_where", "input_scores"),
    *("num_buckets", "schema_version", _APPEND_TO),
}
"""What may differ from generation to generation; all else must stay."""


def append_configuration(
    output: str, configuration: Mapping[str, Any], describe: Describe
) -> dict[str, Any]:
    """Return what names a run that adds to a dataset: its own configuration, and the shards there.

    A run that has made the newest generation, or that is interrupted, gets the name it had.

    Raises:
        OptionsError: no dataset, one that lost files, or one made with other options.
        DatasetError: its manifest is damaged.
    """
    manifest = read_newest(output)
    require_all_files(output, manifest)
    made = dict(manifest.configuration)
    before = made.pop(_APPEND_TO, None)
    if made != dict(configuration) or before is None:
        _require_alike(output, manifest, configuration, describe)
        before = replace(manifest, removed=None).fingerprint  # shards stay when documents leave
    return {**configuration, _APPEND_TO: before}


def _require_alike(
    output: str, manifest: Manifest, configuration: Mapping[str, Any], describe: Describe
) -> None:
    there, here = (
        {name: value for name, value in each.items() if value and name not in _OF_THE_INPUT}
        for each in (manifest.configuration, configuration)
    )
    if there != here:
        raise OptionsError(
            f"--append: {output} was made with other options: {describe(there, here)}; all "
            "documents of a dataset are made with the same options: use those, or another --output"
        )
