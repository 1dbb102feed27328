"""Rules that validation checks, and its findings."""

from dataclasses import dataclass

CHECKS = {
    "manifest": "the manifest is complete, and its totals and fingerprint follow from its shards",
    "files": "the files that the manifest lists exist and have the size it says",
    "sha256": "the files have the SHA-256 that the manifest says",
    "dead_letters": "dead letters are one JSON object a line, counted by reason",
    "removed": "the list of removed documents is the manifest's, in order, of existing documents",
    "generations": "earlier generations' manifests are kept, with the fingerprints they had",
    "duplicate_keys": "no key is in the dataset twice",
    "teacher_losses": "stored losses fit their shards and score manifest, and are finite",
    "plans": "saved plans of rows are those that the dataset gives",
    "statistics": "the manifest's statistics are those of its shards",
    "index": "the index is readable and describes one tar without gap or overlap",
    "tar": "every member is where the index says, with a sound header, and nothing else is there",
    "crc32": "every payload has the CRC-32 that the index says",
    "sample": "every payload decodes to arrays that fit each other",
    "key": "key and document id of sample and index agree, and the key is the id's hash",
    "counts": "tokens, bytes and documents of sample, index and manifest agree",
    "input_ids": "every token id is in the vocabulary",
    "offsets": "byte offsets tile the text, or never decrease if a tokenizer can't tile",
    "spans": "teacher_spans equal an alignment recomputed from the offsets",
    "cut_points": "no cut point divides a token of either side",
    "chats": "a chat's ranges and pieces fit its text, and some, rendered again, give the same",
    "text": "kept text has the length and SHA-256 that its sample says",
    "tokenization": "kept text, tokenized again, gives the same, and tokens stand for their bytes",
}
"""What is checked, by the name that findings carry: of the dataset, then of each shard."""


@dataclass(frozen=True, order=True)
class Finding:
    """A broken rule of `CHECKS`; `shard` and `key` are "" for none."""

    check: str
    shard: str
    key: str
    message: str


class Findings:
    """Findings, notes on what could not be checked, and work done, of a shard or all ("")."""

    def __init__(self, shard: str = "") -> None:
        """Begin empty."""
        self.shard = shard
        self.found: list[Finding] = []
        self.notes: list[str] = []
        self.num_tokenized_again = 0

    def add(self, check: str, message: str, *, key: str = "") -> None:
        """Add a broken rule."""
        self.found.append(Finding(check, self.shard, key, message))

    def note(self, text: str) -> None:
        """Add what could not be checked."""
        self.notes.append(text)

    def take_over(self, other: "Findings") -> None:
        """Add others, each with its own shard."""
        self.found += other.found
        self.notes += other.notes
        self.num_tokenized_again += other.num_tokenized_again
