"""Stored losses against a teacher that runs while training: equal, or refused with the reason."""

import errno
import json
import os
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.command_line.failures import hints_of
from pipeline.dataset.score_files import list_scores
from pipeline.packing.kernels import ENDS, STARTS
from pipeline.streaming import AlignedRows, Rows, StreamMismatchError, collate_rows, load_batches
from pipeline.training.command import main as train_main
from schemas.errors import DamagedShardError, DatasetError, ForeignLossesError
from tests.support import teaching
from tests.support.datasets import build_dataset, make_texts
from tests.support.scored_data import SEQ_LENGTH, online_losses, run_score
from tests.support.streaming_data import around

HALF_STEP = 2.0**-11
"""Relative distance of fp16 numbers to what they stand for."""

FP32_NOISE = 2e-5
"""Nats by which two orders of the same fp32 sums differ."""


def open_rows(world: Path, **changes: object) -> AlignedRows:
    given = {"seq_length": SEQ_LENGTH, "stored_losses": "teacher"} | changes
    return teaching.open_rows(world / "data", **given)


def all_rows(rows: AlignedRows) -> Rows:
    return rows.__getitems__(range(len(rows)))


def path_of(world: Path, **context: object) -> str:
    """Return the score manifest whose rule has these values."""
    (found,) = (
        path
        for path in (world / "data").glob("teacher-*.json")
        if context.items() <= json.loads(path.read_text())["rule"]["context"].items()
    )
    return str(found)


def require_online_losses(world: Path, batch: Rows) -> torch.Tensor:
    """Check that rows hold the losses of a teacher that runs; return where there are any."""
    online = online_losses(world / "teacher", batch)
    has_loss = ~batch["teacher_losses"].isnan()
    torch.testing.assert_close(
        batch["teacher_losses"][has_loss], online[has_loss], rtol=HALF_STEP, atol=FP32_NOISE
    )
    return has_loss


def test_cached_and_online_losses_differ_by_fp16_rounding(world: Path) -> None:
    rows = open_rows(world)
    batch = all_rows(rows)
    cached, online = batch["teacher_losses"], online_losses(world / "teacher", batch)
    ends = [row.unique_consecutive()[-2] for row in batch["teacher_cu_seqlens"]]
    is_text = torch.arange(cached.shape[1]) < torch.stack(ends)[:, None]
    expected = is_text & (batch["teacher_position_ids"] > 0)
    assert torch.equal(~cached.isnan(), expected)
    assert int(expected.sum()) == rows.manifest.totals["num_teacher_tokens"]
    difference = (cached - online)[expected].abs()
    assert (difference <= HALF_STEP * online[expected] + FP32_NOISE).all()
    assert difference.max() > FP32_NOISE  # stored in 16 bits, after all


def test_cached_and_online_rows_are_the_same_otherwise(world: Path) -> None:
    cached, online = open_rows(world), open_rows(world, stored_losses=None)
    assert len(cached) == len(online) > 40
    for number in range(0, len(cached), 7):
        fields = dict(cached[number].items())
        del fields["teacher_losses"]
        assert fields.keys() == online[number].keys()
        assert all(torch.equal(tensor, online[number][name]) for name, tensor in fields.items())
        # So that averages over all teacher tokens are of the same ones.
        assert torch.equal(cached[number].teacher_has_loss, online[number].teacher_has_loss)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_cached_losses_reach_worker_processes(world: Path) -> None:
    rows = open_rows(world)
    loaded = collate_rows([Rows(b.buffer[0], b.layout) for b in load_batches(
        rows, micro_batch_size=1, num_workers=2)])  # fmt: skip
    torch.testing.assert_close(
        loaded["teacher_losses"], all_rows(rows)["teacher_losses"], equal_nan=True, rtol=0, atol=0
    )


def test_other_lengths_are_refused_where_a_document_is_split_differently(world: Path) -> None:
    with pytest.raises(ForeignLossesError) as refused:
        open_rows(world, seq_length=48)
    message = str(refused.value)
    assert "was scored for rows of 64 student and 64 teacher tokens, which splits " in message
    assert "rows of 48 student and 64 teacher tokens split them elsewhere" in message
    assert "run vocag score again with --seq-length 48 --teacher-seq-length 64" in message
    assert hints_of(refused.value) == ["hint: seq_length=64 teacher_seq_length=64"]


def test_a_checkpoint_of_another_teachers_losses_is_refused(world: Path) -> None:
    rows = open_rows(world)
    state = rows.state(0)
    assert state.teachers == rows.teachers_rule.fingerprint
    assert rows.restore(replace(state, teachers="")) == 0, "from before it was kept"
    with pytest.raises(
        StreamMismatchError, match=f"made with teachers 0, .* {state.teachers}: the l"
    ):
        rows.restore(replace(state, teachers="0"))
    assert open_rows(world, stored_losses=None).state(0).teachers == ""


def test_other_tokens_around_the_students_texts_are_named(world: Path) -> None:
    with pytest.raises(ForeignLossesError) as refused:
        open_rows(world, student_bos="none", student_eos="none")
    message = str(refused.value)
    assert "these rows have 0 token before a text, 0 before its rest and 0 after it" in message
    assert "with --student-bos and --student-eos of the run" in message
    assert "--seq-length" not in message
    assert hints_of(refused.value) == []


def test_lengths_that_split_no_document_agree_with_each_other(copied: Path) -> None:
    run_score(copied, seq_length=500)
    path = path_of(copied, seq_length=500)
    batch = all_rows(open_rows(copied, seq_length=512, stored_losses=path))
    require_online_losses(copied, batch)
    with pytest.raises(ForeignLossesError, match="rows of 500 student and"):
        open_rows(copied, stored_losses=path)
    for length in (SEQ_LENGTH, 500):
        with pytest.raises(DatasetError, match=r'2 teachers are named "teacher" in .*') as told:
            open_rows(copied, seq_length=length)
        assert "rows of 500" in str(told.value)
        (hint,) = hints_of(told.value)
        path = path_of(copied, seq_length=length)
        assert hint == f"hint: stored_losses={Path(path).stem.removeprefix('teacher-')}"


def test_another_convention_is_refused(world: Path) -> None:
    with pytest.raises(ForeignLossesError, match=r"scored with first_token_id \d+, these rows"):
        open_rows(world, teacher_context="5")


def test_a_named_context_is_scored_with_and_recorded(copied: Path) -> None:
    run_score(copied, "--teacher-context", "none")
    path = path_of(copied, first_token_id=None)
    with pytest.raises(ForeignLossesError, match=r"give both the same teacher_context .*none"):
        open_rows(copied, stored_losses=path)
    rows = open_rows(copied, stored_losses=path, teacher_context="none")
    assert rows.rules.teacher == around()
    batch = all_rows(rows)
    has_loss = require_online_losses(copied, batch)
    num_pieces = rows.manifest.totals["num_teacher_tokens"] - int(has_loss.sum())
    assert num_pieces >= rows.manifest.totals["num_documents"]


def test_losses_of_other_data_are_refused(world: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "other" / "data", make_texts(40, seed=9))
    (scores,) = (world / "data").glob("teacher-*.json")
    with pytest.raises(ForeignLossesError, match=r"was made for dataset .*, this is .*: run"):
        open_rows(tmp_path / "other", stored_losses=str(scores))


def test_incomplete_losses_are_refused(copied: Path) -> None:
    (scores,) = (copied / "data").glob("teacher-*.json")
    body = json.loads(scores.read_text())
    sidecar = copied / "data" / body["sidecars"][1]["file"]
    whole = sidecar.read_bytes()
    sidecar.write_bytes(whole[:-2])
    with pytest.raises(ForeignLossesError, match=rf"{sidecar.name} has {len(whole) - 2} bytes"):
        open_rows(copied)
    sidecar.unlink()
    with pytest.raises(ForeignLossesError, match=rf"{sidecar.name} is missing: run vocag score"):
        open_rows(copied)
    del body["sidecars"][1]
    scores.write_text(json.dumps(body))
    with pytest.raises(ForeignLossesError, match="sidecars of 2 shards, the dataset has 3, docs-"):
        open_rows(copied)
    scores.unlink()
    with pytest.raises(DatasetError, match=r'no scores by teacher "teacher" in .*: nothing has'):
        open_rows(copied)


def test_a_folder_that_cannot_be_listed_is_not_one_without_scores(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(MemoryFileSystem, "ls", fail)
    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, fail)
    for location in (str(world / "data"), "memory://data"):
        with pytest.raises(OSError, match="Input/output error"):
            list_scores(location)


@pytest.mark.parametrize("status", [403, 404, 405, 500])
def test_a_server_without_listings_has_scores_by_path_alone(status: int) -> None:
    """nginx answers 403 for a folder; a server that fails isn't one without scores."""

    class Unlisted(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Unlisted) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        location = f"http://127.0.0.1:{server.server_port}/data"
        if status == 500:
            with pytest.raises(Exception, match="500"):
                list_scores(location)
        else:
            assert list_scores(location) == []
        server.shutdown()


def test_a_manifest_that_lacks_losses_is_refused(copied: Path) -> None:
    (scores,) = (copied / "data").glob("teacher-*.json")
    body = json.loads(scores.read_text())
    body["sidecars"][2]["num_losses"] -= 1
    scores.write_text(json.dumps(body))
    with pytest.raises(ForeignLossesError, match=r"has losses of \d+ tokens, but \d+ have a"):
        open_rows(copied, stored_losses="")


def test_an_altered_sidecar_is_refused_when_it_is_read(copied: Path) -> None:
    sidecar = next((copied / "data").glob("*.safetensors"))
    data = bytearray(sidecar.read_bytes())
    data[-1] ^= 1
    sidecar.write_bytes(data)
    rows = open_rows(copied, on_damage="quarantine")
    with pytest.raises(DamagedShardError, match=rf"{sidecar.name} is not the sidecar that its"):
        all_rows(rows)


def test_the_trainer_wants_one_source_of_losses(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", str(world / "data"), "--student", "s", "--output", str(tmp_path)]
    assert (
        train_main([*common, "--method", "teacher", "--teacher", "t", "--stored-losses", "t"]) == 2
    )
    assert "choose one" in capsys.readouterr().err
    assert train_main([*common, "--method", "kld", "--stored-losses", "t"]) == 2
    assert "--stored-losses are given, and --method kld needs a teacher" in capsys.readouterr().err


def test_losses_of_all_documents_serve_some_of_them(world: Path) -> None:
    """Without the long ones a shard has fewer contexts; those that are left are the same."""
    pytest.importorskip("duckdb")
    whole, some = open_rows(world), open_rows(world, where=f"num_student_tokens < {SEQ_LENGTH}")
    assert some.datasets[0].plan.segments["flags"].min() == STARTS | ENDS
    assert whole.datasets[0].plan.segments["flags"].min() < STARTS | ENDS
    batch = all_rows(some)
    has_context = batch["teacher_position_ids"] > 0
    is_text = has_context & (batch["teacher_input_ids"] != 0)
    assert is_text.sum() > SEQ_LENGTH
    assert not batch["teacher_losses"][is_text].isnan().any()
