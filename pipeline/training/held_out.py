"""Bits per byte of a student on unseen text."""

import math
from collections.abc import Mapping
from dataclasses import replace
from shlex import quote

import torch
from transformers import PreTrainedModel

from pipeline.command_line.failures import hinted
from pipeline.dataset.chosen_documents import Kept
from pipeline.losses.loss_checks import put_off
from pipeline.methods.hf_pass import score_labels, student_states
from pipeline.packing.opening import open_run
from pipeline.streaming import AlignedRows, StreamConfig
from pipeline.training.config import TrainConfig
from pipeline.training.ranks import Ranks
from schemas.errors import ForeignTokenizerError
from schemas.index import ShardIndex

BITS_PER_BYTE = "heldout_bits_per_byte"
# Tokens, unless a micro-batch has more: long rows would take more memory than training does.
_TOKENS_AT_ONCE, _ROWS_AT_ONCE = 2**14, 8


def open_heldout(sets: Mapping[str, str], training: AlignedRows) -> dict[str, AlignedRows]:
    """Open a run's held-out sets, by name.

    The training data's token comes before a text, whatever a set has recorded.
    ForeignTokenizerError for a different student tokenizer; ValueError for a mixture, or without a
    token before a text.
    """
    opened: dict[str, AlignedRows] = {}
    endless = replace(training.rules.student, end_token_id=None)
    for name, path in sets.items():
        stream = StreamConfig(
            path,
            seq_length=training.config.seq_length,
            seed=training.config.seed,
            one_document_a_row=training.rules.one_document_a_row,
            text_labels=True,
            cache_folder=training.config.cache_folder,
            cache_bytes=training.config.cache_bytes,
        )
        run = open_run(stream.reading, seed=stream.seed)
        own = run.manifest.student.around_text
        is_chats = run.manifest.chats is not None
        around = endless
        if is_chats or training.manifest.chats is not None:  # each has the fields of its kind
            around = replace(own, end_token_id=None)
        record = replace(run.manifest.student, convention=around)
        run = replace(run, manifest=replace(run.manifest, student=record))
        rows = AlignedRows(stream, opened=run)
        if rows.layout.sources:
            raise ValueError(f"heldout={name}={path} is a mixture: name its datasets instead")
        _require_same_student(path, rows, training)
        if around.first_token_id is None and not is_chats:
            raise ValueError(f"{path}: without a context token the first token has no loss")
        opened[name] = rows
    return opened


def evaluate(
    config: TrainConfig, student: PreTrainedModel, heldout: Mapping[str, AlignedRows], ranks: Ranks
) -> dict[str, float]:
    """Return each held-out set's bits per byte, such as `heldout_bits_per_byte/math`."""
    return {
        BITS_PER_BYTE if len(heldout) == 1 else f"{BITS_PER_BYTE}/{name}": bits_per_byte(
            config, student, rows, ranks
        )
        for name, rows in heldout.items()
    }


@torch.inference_mode()
def bits_per_byte(
    config: TrainConfig, student: PreTrainedModel, rows: AlignedRows, ranks: Ranks
) -> float:
    """Return a student's code length per byte of text, comparable between tokenizers.

    As in `vocag evaluate --measures text`, tokens around a text cost nothing. Of chats, only
    learned bytes count.
    """
    student.train(False)
    total = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    fitting = max(config.micro_batch_size, _TOKENS_AT_ONCE // config.seq_length)
    at_once = min(fitting, _ROWS_AT_ONCE)
    with put_off() as checks:
        for start in range(ranks.number * at_once, len(rows), ranks.count * at_once):
            numbers = range(start, min(start + at_once, len(rows)))
            batch = rows.__getitems__(numbers).to(ranks.device)
            with torch.autocast(ranks.device.type, dtype=torch.bfloat16, enabled=config.bf16):
                scores = score_labels(student, student_states(student, batch), batch)
            total += scores.losses.double().sum()
    checks.look()
    return float(ranks.add_up(total)) / math.log(2) / heldout_bytes(rows)


def heldout_bytes(rows: AlignedRows) -> int:
    """Bytes of a held-out set's text, without removed documents."""
    return sum(rows.opened.datasets[0].documents.each(_num_bytes_read))


def _require_same_student(path: str, heldout: AlignedRows, training: AlignedRows) -> None:
    data = training.config.reading.path
    own, wanted = heldout.manifest.student, training.manifest.student
    if own.sha256 != wanted.sha256:
        error = ForeignTokenizerError(
            f"heldout={path} was made with student tokenizer {own.source} "
            f"({own.sha256[:16]}…), data={data} with {wanted.source} ({wanted.sha256[:16]}…): "
            "align the held-out texts with that one, and name the result"
        )
        if heldout.manifest.chats is not None:  # no input of vocag align
            raise error
        dataset = training.opened.datasets[0].dataset
        # What was named may be a path from another folder; the dataset's copy is there.
        tokenizer = f"{dataset.location}/{wanted.file}" if dataset.is_local else wanted.source
        places = map(quote, (path, tokenizer, f"{path.rstrip('/')}-2"))
        raise hinted(error, "vocag align --input {} --student {} --output {}".format(*places))


def _num_bytes_read(index: ShardIndex, kept: Kept) -> int:
    sizes = index.chats.get("num_learned_bytes", index.num_text_bytes)
    return int((sizes if kept is None else sizes[kept]).sum())
