"""`README.md`: a dataset card for people and the Hugging Face Hub."""

from beam_jobs.left_out import share_lost
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_plural,
    format_ratio,
    format_share,
    public_name,
)
from schemas.manifest import Manifest

CARD_FILE = "README.md"

MARK = "<!-- Written by vocag align; without this line it is yours and stays as it is. -->"
"""In cards that may be replaced."""

_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"),
          (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"))  # fmt: skip
_LARGEST = "n>1B"


def render_card(manifest: Manifest, read: Manifest | None = None) -> str:
    """Return front matter for the Hub, then main facts.

    `read` is `count_read`'s, if documents are removed; they were not left out of the input.
    """
    totals, letters = (read or manifest).totals, manifest.dead_letters
    num_lost, num_seen = share_lost(manifest)
    newest = " of what was added last" if manifest.generation else ""
    documents, student = totals["num_documents"], totals["num_student_tokens"]
    names = [_code(public_name(side.source)) for side in (manifest.student, manifest.teacher)]
    facts = {
        "documents": format_count(documents),
        "text": format_bytes(totals["num_text_bytes"]),
        "student tokens": f"{format_count(student)}, by {names[0]}",
        "teacher tokens": f"{format_count(totals['num_teacher_tokens'])}, by {names[1]}",
        "teacher tokens a student token": format_ratio(totals["num_teacher_tokens"], student),
        "left out": f"{format_count(num_lost)} ({format_share(num_lost, num_seen)}){newest}, "
        f"named in `{letters.file}`",
        **_growth(manifest),
        "fingerprint": f"`{manifest.fingerprint}`",
    }
    lines = [*_front_matter(read or manifest), MARK, "", f"# {manifest.name}", "", _ABOUT, ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join([*lines, "", _USE if manifest.removed is None else _USE_LESS_REMOVED])


def _growth(manifest: Manifest) -> dict[str, str]:
    if not manifest.generation:
        return {}
    told = {"generation": format_count(manifest.generation)}
    if manifest.removed is not None:
        removed = format_plural(manifest.removed.count, "document")
        told["removed"] = f"{removed}, still in the shards"
    return told


def _front_matter(manifest: Manifest) -> list[str]:
    count = manifest.totals["num_documents"]
    size = next((name for limit, name in _SIZES if count < limit), _LARGEST)
    return [
        "---",
        "task_categories:",
        "- text-generation",
        "tags:",
        "- vocag",
        "- webdataset",
        "size_categories:",
        f"- {size}",
        "configs:",  # for viewers: a row for each document
        "- config_name: index",
        '  data_files: "*.index.parquet"',
        "---",
    ]


def _code(text: str) -> str:
    """Format text as code that can't leave its table cell."""
    cell = " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
    return f"`{cell.replace('`', '')}`"


_ABOUT = (
    "Documents that a student's and a teacher's tokenizer have each split into tokens, and for "
    "every student token the run of teacher tokens over the same text: what vocabulary-agnostic "
    "teacher guidance ([arXiv 2503.19123](https://arxiv.org/abs/2503.19123)) is trained on."
)
_USE = """\
## Use it

```python
from vocag import AlignedRows, StreamConfig, load_batches

rows = AlignedRows(StreamConfig("this folder or its URL", seq_length=2048))
```

Shards are plain WebDataset tars; `manifest.json` names every file with its SHA-256. The index is a
table with a row for each document: in DuckDB `SELECT * FROM '*.index.parquet'`, in pandas
`pandas.concat(map(pandas.read_parquet, glob("*.index.parquet")))`.
"""
_USE_LESS_REMOVED = f"""\
{_USE.partition(" The index is")[0]}

**Removed documents** are left out by vocag alone: `webdataset`, `datasets`, pandas and DuckDB still
deliver them, texts included. `vocag align --input DATASET --output NEW` writes a dataset without
them, but for conversations, which are aligned again from their files. Any other reader
must leave out their keys:

```python
from glob import glob
import pandas
from vocag import open_dataset

removed = open_dataset("this folder or its URL").removed_keys()
index = pandas.concat(map(pandas.read_parquet, glob("*.index.parquet")))
index = index[~index["key"].isin(removed)]
```
"""
