"""`vocag transfer`, step by step."""

import logging
from collections.abc import Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.dataset.conventions import describe_tokenizer
from pipeline.dataset.texts import read_texts
from pipeline.drawing.formatting import format_bytes, format_count, format_plural
from pipeline.drawing.progress import watched
from pipeline.models.exported_tokenizer import KnownText, convert_tokenizer, save_model
from pipeline.models.generation_defaults import in_vocabulary, read_generation_defaults
from pipeline.models.output_layer import require_left_to_right
from pipeline.models.teacher_files import find_folder
from pipeline.models.weights import (
    load_weights,
    read_config,
    refuse_nonsense,
    require_reloadable,
)
from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.tokenization.pieces import start_of
from pipeline.training.disk import replacing
from pipeline.transfer.measure import bits_per_byte, context_of
from pipeline.transfer.options import TransferOptions
from pipeline.transfer.origins import Origins, count_pairs, find_origins
from pipeline.transfer.vocabulary_layers import (
    keep_layers,
    require_layers,
    require_transferable,
    transfer_vocabulary,
)

_HELD_OUT_EVERY = 20
_MAX_HELD_OUT, _MAX_HELD_OUT_BYTES = 40, 1000
_DOCUMENTS_AT_ONCE = 1000
_MAX_PROVEN, _MAX_PROVEN_BYTES = 200, 40_000

logger = logging.getLogger(__name__)


def transfer_model(options: TransferOptions) -> Iterator[str]:
    """Write the model with its new tokenizer; yield a line before each step.

    Raises:
        UntransferableError: another part of the model has a row per token.
        TokenizerError: a tokenizer can't be loaded or exported.
        ValueError: no text, or an output that is there.
    """
    options.require_new_output()
    documents = _read(options)  # first, for to find none costs least
    yield f"reading {options.model} and the tokenizer {options.tokenizer}"
    folder = find_folder(options.model, role="model")
    old, new = load_tokenizer(str(folder)), load_tokenizer(options.tokenizer)
    for each in (old, new):
        context_of(each)  # or it can't be measured
    some = documents[::_HELD_OUT_EVERY][:_MAX_HELD_OUT]
    held_out = [start_of(document.text, _MAX_HELD_OUT_BYTES) for document in some]
    others = [text for place, text in enumerate(documents) if place % _HELD_OUT_EVERY]
    seen = others or documents  # one text is all there is
    model: Any = load_weights(folder, dtype="auto")
    require_reloadable(model)
    require_transferable(model)
    require_left_to_right(model)
    refuse_nonsense(model, options.model)
    if options.layers:
        require_layers(model, options.layers)
    num_rows = _count_rows(options, new)
    defaults = read_generation_defaults(str(folder))
    defaults, left = in_vocabulary(defaults, old, new, num_rows=num_rows)
    # Before the costly steps: without a tokenizer for transformers the model is useless.
    yield "trying the tokenizer in transformers"
    record, known = describe_tokenizer(new, "tokenizer"), _known(new, seen)
    config = model.config.to_dict() | {"vocab_size": num_rows}
    tokenizer = convert_tokenizer(new, record, known, config=config, defaults=defaults)
    num_bytes = sum(len(document.text) for document in seen)
    yield f"aligning {format_plural(len(seen), 'document')} ({format_bytes(num_bytes)})"
    pairs = count_pairs(_align(seen, new, old))
    own_rows = model.get_input_embeddings().weight.shape[0]
    origins = find_origins(new, old, pairs, num_rows=own_rows)
    yield f"measuring the model on {format_plural(len(held_out), 'text')}"
    before = bits_per_byte(model, old, held_out)
    yield f"making {format_plural(num_rows, 'row')} for {format_plural(new.vocab_size, 'token')}"
    if options.layers:
        model = keep_layers(model, options.layers)
    transfer_vocabulary(model, origins, num_rows=num_rows)
    yield f"measuring the new model, and writing {options.output}"
    after = bits_per_byte(model, new, held_out)
    weights = list(model.parameters())
    output = Path(options.output).absolute()
    with replacing(output, sum(weight.nbytes for weight in weights)) as temporary:
        save_model(model, tokenizer, temporary)
        options.require_new_output()  # minutes later; what came meanwhile isn't ours
    size = sum(weight.numel() for weight in weights)
    yield from _describe(options.output, size, num_rows, origins)
    yield (
        f"bits per byte of {format_plural(len(held_out), 'text')} that "
        f"{'no embedding was' if others else 'embeddings were'} made of: "
        f"{before:.3f} before, {after:.3f} after"
    )
    yield str(tokenizer)
    if left:
        yield f"left out, for the new vocabulary has nothing for it: {', '.join(left)}"
    yield "next: align with it, score with the old model, train (vocag transfer --help)"


def _describe(output: str, size: int, num_rows: int, origins: Origins) -> Iterator[str]:
    yield (
        f"{output}: {format_count(size)} parameters, {format_count(len(origins.rules))} tokens, "
        f"{format_count(num_rows)} rows"
    )
    counts = origins.counts(num_rows=num_rows)
    for rule, count in counts.items():
        yield f"  {rule:<10} {format_count(count):>9}  {100 * count / sum(counts.values()):5.1f} %"


def _count_rows(options: TransferOptions, new: Tokenizer) -> int:
    if options.rows_of is None:
        return -(-new.vocab_size // options.multiple) * options.multiple
    folder = find_folder(options.rows_of, role="target", files=("config.json",))
    rows: int = read_config(folder).get_text_config(decoder=True).vocab_size
    if any(map(new.token_bytes, range(rows, new.vocab_size))):  # control tokens may lie beyond
        raise ValueError(
            f"--rows-of {options.rows_of}: it has {rows} rows, {options.tokenizer} has "
            f"{new.vocab_size} tokens: name the target that has this tokenizer"
        )
    return rows


def _read(options: TransferOptions) -> list[SourceDocument]:
    documents, left = [], options.text_megabytes << 20
    for document in read_texts(options.text, text_field=options.text_field):
        left -= len(document.text)
        if left < 0:
            break
        if document.text:
            documents.append(document)
    if not documents:
        raise ValueError(
            f"--text {' '.join(options.text)} holds no text of at most "
            f"{options.text_megabytes} MB: name other files, or raise --text-megabytes"
        )
    return documents


def _align(
    documents: Sequence[SourceDocument], new: Tokenizer, old: Tokenizer
) -> Iterator[AlignedBatch]:
    parts = list(batched(documents, _DOCUMENTS_AT_ONCE))
    failures: list[tuple[SourceDocument, str]] = []
    for part in watched(parts, "aligning", "documents", each=_DOCUMENTS_AT_ONCE):
        batch = align_batch(list(part), new, old)
        failures += batch.failures
        yield batch
    if failures:
        document, reason = failures[0]
        logger.warning(
            "%d of %d documents can't be aligned and are left out, first %s (%s; the student's "
            "tokenizer is the new one)",
            len(failures),
            len(documents),
            document.document_id,
            reason,
        )


def _known(new: Tokenizer, documents: Sequence[SourceDocument]) -> Iterator[KnownText]:
    # transformers takes 160 times a text's memory.
    some = documents[:_MAX_PROVEN]
    texts = [start_of(document.text, _MAX_PROVEN_BYTES) for document in some]
    batch = new.tokenize_batch(texts)
    for place, (document, text) in enumerate(zip(some, texts, strict=True)):
        if place not in batch.failures:
            ids = batch.input_ids[slice(*batch.cu_tokens[place : place + 2])].tolist()
            yield KnownText(document.document_id, text.decode(), ids)
