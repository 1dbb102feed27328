"""The dataset card: what the Hub reads of it, and whose words it never replaces."""

from dataclasses import replace
from pathlib import Path

import yaml

from beam_jobs.align.command import align
from beam_jobs.report.card import CARD_FILE, MARK, render_card
from beam_jobs.report.page import _first_answers
from pipeline.drawing.formatting import format_share
from tests.beam_jobs.align.test_metadata import options, write_rows
from tests.support.datasets import remove_documents
from tests.support.manifests import MANIFEST


def test_align_writes_one_and_leaves_a_persons_own_words(tmp_path: Path) -> None:
    write_rows(tmp_path)
    manifest = align(options(tmp_path, "rows.jsonl"))
    card = tmp_path / "out-rows.jsonl" / CARD_FILE
    text = card.read_text("utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["size_categories"] == ["n<1K"]
    assert front["configs"] == [{"config_name": "index", "data_files": "*.index.parquet"}]
    assert f"`{manifest.fingerprint}`" in text
    card.write_text("# mine\n")
    remove_documents(card.parent, "a")
    assert card.read_text() == "# mine\n"


def test_what_is_left_out_is_what_is_lost() -> None:
    """Not documents that are there, nor a file's letter next to those of its documents."""
    num = sum(shard.num_documents for shard in MANIFEST.newest_shards)
    for by_reason, lost in (({"known_id": 20}, 0), ({"bad_json": 1, "nothing_usable": 1}, 1)):
        letters = replace(MANIFEST.dead_letters, count=sum(by_reason.values()), by_reason=by_reason)
        manifest = replace(MANIFEST, dead_letters=letters)
        seen = num + letters.count - by_reason.get("nothing_usable", 0)
        assert f"| left out | {lost} ({format_share(lost, seen)})" in render_card(manifest)
        told = "".join("".join(each.itertext()) for each in _first_answers(manifest, 1.0))
        assert f"{seen - num} of {seen} documents" in told


def test_what_is_removed_changes_no_share_of_what_was_left_out() -> None:
    letters = replace(MANIFEST.dead_letters, count=2, by_reason={"bad_json": 2})
    manifest = replace(MANIFEST, dead_letters=letters)
    read = replace(manifest, shards=[replace(each, num_documents=0) for each in manifest.shards])
    lines = render_card(manifest, read).splitlines()
    assert "| documents | 0 |" in lines
    assert [line for line in lines if "left out |" in line] == [
        line for line in render_card(manifest).splitlines() if "left out |" in line
    ]


def test_names_can_not_leave_their_cells() -> None:
    hostile = replace(MANIFEST.student, source="a|b\n# heading `x` <script>")
    text = render_card(replace(MANIFEST, student=hostile))
    assert "by `a\\|b # heading x &lt;script>` |" in text
    assert text.count(MARK) == 1
