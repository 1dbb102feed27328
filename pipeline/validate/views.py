"""Check a dataset's views: is each what a fresh alignment of its pair of tokenizers gives?"""

from pipeline.alignment.quality import AlignmentStatistics
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import DatasetTokenizers, load_dataset_tokenizers
from pipeline.validate.findings import Findings
from pipeline.validate.samples import check_samples
from pipeline.validate.shard import Advance, check_digest, describe, open_file
from pipeline.validate.tar import FileDigest, Sample, digest_file
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.manifest import ViewFileRecord
from schemas.viewed import view_manifest

_SAMPLES_AT_ONCE = 256


def check_views(
    dataset: Dataset, *, with_tokenizers: bool = False, advance: Advance = int
) -> tuple[Findings, dict[str, AlignmentStatistics]]:
    """Check the files of every view, and every document in them.

    Args:
        dataset: as it was aligned; its own shards are sound.
        with_tokenizers: tokenize kept text again, too.
        advance: told of the bytes read.

    Returns:
        The findings, each under the name of the view's file; and by view the statistics of its
        sound documents.

    Raises:
        TokenizerError: `with_tokenizers`, and a copy is no tokenizer.

    Example:
        >>> check_views(open_dataset("aligned"))[0].found  # doctest: +SKIP
        []
    """
    findings = Findings()
    measured: dict[str, AlignmentStatistics] = {}
    for view in dataset.manifest.views:
        copy, claim = view.tokenizer.file, view.tokenizer.sha256
        digest = _check_file(dataset.location, copy, None, claim, findings)
        can_tokenize = with_tokenizers and digest is not None and digest.sha256 == claim
        try:
            seen = Dataset(dataset.location, view_manifest(dataset.manifest, view.name))
        except DatasetError as error:  # whoever reads it is told, too
            findings.note(f"view {view.name} was not checked: {error}")
            continue
        tokenizers = load_dataset_tokenizers(seen) if can_tokenize else None
        parts = [_check_shard(seen, shard, findings, tokenizers, advance)
                 for shard in range(len(seen.manifest.shards))]  # fmt: skip
        measured[view.name] = AlignmentStatistics.merge(parts)
    return findings, measured


def _check_shard(
    dataset: Dataset,
    shard: int,
    findings: Findings,
    tokenizers: DatasetTokenizers | None,
    advance: Advance,
) -> AlignmentStatistics:
    """Check a shard's two files of the view, and what they hold; return its statistics."""
    assert dataset.view is not None
    record, own = dataset.view.files[shard], Findings(dataset.view.files[shard].file)
    folder = dataset.location
    sound = _check_file(folder, record.file, record.num_bytes, record.sha256, own, advance)
    _check_file(folder, record.index_file, record.index_num_bytes, record.index_sha256, own)
    statistics = AlignmentStatistics.empty()
    try:
        index = dataset.read_index(shard, with_names=True)
        _check_counts(dataset, shard, index, record, own)
        if sound is not None:
            statistics = _check_documents(dataset, shard, index, own, tokenizers)
    except DatasetError as error:
        own.add("index", str(error))
    findings.take_over(own)
    return statistics


def _check_counts(
    dataset: Dataset, shard: int, index: ShardIndex, record: ViewFileRecord, findings: Findings
) -> None:
    view_index = dataset.read_view_index(shard)
    sizes = {
        "num_tokens": int(view_index.num_tokens.sum()),
        "num_left_out": len(view_index.left_out),
        "num_bytes": int(view_index.starts[-1]),
    }
    for name, value in sizes.items():
        if getattr(record, name) != value:
            claim = getattr(record, name)
            findings.add("counts", f"{name} is {value} by the index, the manifest says {claim}")


def _check_documents(
    dataset: Dataset,
    shard: int,
    index: ShardIndex,
    findings: Findings,
    tokenizers: DatasetTokenizers | None,
) -> AlignmentStatistics:
    """Check each document; one that can't be read is a finding, and the others go on."""
    left_out = set(dataset.read_view_index(shard).left_out.tolist())
    places = [place for place in range(len(index)) if place not in left_out]
    statistics, samples = [], list[Sample]()

    def check() -> None:
        statistics.append(
            check_samples(samples, index, dataset.manifest, findings, tokenizers=tokenizers)
        )
        samples.clear()

    while places:
        done = 0
        try:
            for place, payload in dataset.samples(shard, index, documents=places):
                samples.append(Sample(place, bytes(payload)))
                done += 1
                if len(samples) == _SAMPLES_AT_ONCE:
                    check()
        except DatasetError as error:
            findings.add("crc32", str(error), key=index.key[places[done]])
            done += 1
        places = places[done:]
    check()
    return AlignmentStatistics.merge(statistics)


def _check_file(
    folder: str,
    name: str,
    num_bytes: int | None,
    sha256_hex: str,
    findings: Findings,
    advance: Advance = int,
) -> FileDigest | None:
    """Report a file that is not the manifest's; return its digest, None where there is none."""
    try:
        with open_file(folder, name) as file:
            digest = digest_file(file, advance)
    except OSError as error:
        findings.add("files", f"{name} can't be read: {describe(error)}")
        return None
    check_digest(name, digest, num_bytes, sha256_hex, findings)
    return digest
