"""The options of `vocag remove`."""

from dataclasses import dataclass
from typing import Annotated

from pipeline.command_line.option_parsing import DatasetSource, Option, Rest

EXAMPLES = """\
examples:
  # takedowns: one id a line
  vocag remove aligned --ids takedowns.txt

  # documents that hold questions of test sets, some of them left out already
  vocag overlap aligned --output overlap
  vocag remove aligned --ids overlap/overlap.jsonl

  # what would that take out? (nothing is written)
  vocag remove gs://bucket/aligned --ids takedowns.txt --ignore-unknown --dry-run

the list: one id a line; in a file .jsonl or .ndjson, one JSON object a line with document_id or id.

The dataset gets a new generation. New runs never see these documents again; a run that has started
keeps its exact rows, unless you pass --generation latest. The documents' bytes stay in the shards,
and readers other than vocag (webdataset, datasets, pandas, DuckDB) still deliver them:
vocag align --input DATASET --output NEW writes a dataset without them (not of conversations, which
are aligned again from their files). Their ids stay taken, so vocag align --append does not bring
them back.

exit status: 0 done, or nothing was left to do; 2 wrong usage, and nothing was written.

Every other option goes to Apache Beam (for an object store)."""


@dataclass(frozen=True)
class RemoveOptions:
    """Take documents out of a finished dataset, at once and without rewriting a shard.

    If it was interrupted, run the same command again.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        ids: list of the documents' ids, or - for standard input.
        ignore_unknown: skip unknown ids and print how many there were.
        dry_run: print what would be removed; write nothing.
        quiet: print only errors.
        beam_arguments: options for Beam.
    """

    dataset: DatasetSource
    ids: Annotated[str, Option("FILE")]
    ignore_unknown: bool = False
    dry_run: bool = False
    quiet: bool = False
    beam_arguments: Rest = ()
