"""What a job needs of the machine."""

from beam_jobs import storage
from beam_jobs.align.inputs.parts import SAMPLE_BYTES_PER_TEXT_BYTE
from beam_jobs.align.options import AlignOptions, Shuffle

BASE_MEMORY = 850 * 10**6
"""Python, Beam, two tokenizers, their memory of words, and the batches under way."""

MEMORY_PER_DOCUMENT_BYTE = 40
"""Both tokenizations, their spans and the sample of one document take 19 for each byte of its text,
and 40 in the process that reads it again for the report, where texts aren't kept; measured with
documents of 1 and 16 MB."""


def choose_shuffle(options: AlignOptions) -> Shuffle:
    """Return how texts travel: through files wherever workers share a file system."""
    if options.shuffle != "auto":
        return options.shuffle
    return "files" if storage.is_local(options.output) else "runner"


def estimate_memory(shard_bytes: int, *, keep_text: bool, longest_document: int = 0) -> int:
    """Return about how many bytes of memory a process of the job has at most, mapped files too.

    The longest document is aligned and encoded in one piece.
    """
    bucket = shard_bytes // (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text)
    return BASE_MEMORY + 3 * bucket + MEMORY_PER_DOCUMENT_BYTE * longest_document


def estimate_disk(text_bytes: int, *, keep_text: bool, shuffle: Shuffle) -> int:
    """Return about how many bytes a job has on its output's disk at most, in its last minutes.

    The shards are written once and only renamed in the end; with `shuffle="files"` the texts, in
    blocks, exist next to them until then.
    """
    return text_bytes * (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text + (shuffle == "files"))
