"""How much disk a view takes, judged by a few documents before it is made."""

import io
from collections.abc import Sequence

import numpy as np

from beam_jobs import storage
from beam_jobs.shortages import require_room
from pipeline.dataset.view_writing import ViewWriter
from pipeline.drawing.formatting import format_bytes, format_plural
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument
from schemas.manifest import ShardRecord
from schemas.view_file import VIEW_MAGIC, Side, view_file_names
from schemas.view_index import encode_view_index, take_view_documents


def estimate_disk(
    documents: Sequence[AlignedDocument],
    texts: Sequence[bytes],
    shards: Sequence[ShardRecord],
    tokenizer: Tokenizer,
    side: Side,
) -> int:
    """Return about how many bytes a view of some shards takes, both files of each.

    How many tokens a tokenizer makes of a text is not known before, nor how many bits its ids take;
    a few documents are written, and their bytes count by those of their text.

    Args:
        documents: the few, as a shard holds them.
        texts: theirs.
        shards: of which the view is made.
        tokenizer: the view's.
        side: which one its tokens replace.

    Example:
        >>> estimate_disk(documents, texts, manifest.shards, tokenizer, "teacher") // 10**9
        31
    """
    writer = ViewWriter(io.BytesIO(), tokenizer, side)
    writer.add(documents, texts)
    written = writer.close()
    no_documents = take_view_documents(written.index, np.empty(0, np.int64))
    bare = len(encode_view_index(no_documents))
    of_sample = written.num_bytes - len(VIEW_MAGIC) + len(encode_view_index(written.index)) - bare
    num_text_bytes = sum(shard.num_text_bytes for shard in shards)
    share = num_text_bytes / max(1, sum(map(len, texts)))
    return round(of_sample * share) + len(shards) * (bare + len(VIEW_MAGIC))


def require_disk(
    output: str, view: str, need: int, *, num_documents: int, shards: Sequence[ShardRecord]
) -> None:
    """Check that a local dataset's disk has room for a view, with what of it is there already.

    Args:
        output: the dataset's folder.
        view: its name.
        need: from `estimate_disk`.
        num_documents: by which that was judged.
        shards: of which the view is made.

    Raises:
        OptionsError: it has less than half; the estimate can't be that wrong.
    """
    names = {name for shard in shards for name in view_file_names(shard.file, view)}
    found = storage.list_folder(output) if storage.is_local(output) else {}
    require_room(
        output,
        need,
        f'{output} has {{room}} of free disk, and view "{view}" will take about '
        f"{format_bytes(need)} there, judged by {format_plural(num_documents, 'document')}",
        remedy="free some, or copy the dataset to a larger disk",
        least=0.5,
        there=sum(num_bytes for name, num_bytes in found.items() if name in names),
    )
