"""Damaged samples: raise, or leave out, counted and listed."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.command_line.links import open_unlinked, refuse_link

logger = logging.getLogger(__name__)

OnDamage = Literal["raise", "quarantine"]


@dataclass(frozen=True)
class QuarantinedSample:
    """A sample that could not be used, with its whole document's student tokens.

    Key and id are "" if the shard's index is unreadable.
    """

    shard: str
    key: str
    document_id: str
    num_student_tokens: int
    reason: str


class DamageLog:
    """Raises for a damaged sample, or lists it once per process."""

    def __init__(self, on_damage: OnDamage, file: Path) -> None:
        """In quarantine, append JSON lines to `file`."""
        self.on_damage = on_damage
        self.file = file
        self.samples: dict[int, QuarantinedSample] = {}

    def note(self, document: int, sample: QuarantinedSample, error: ValueError) -> None:
        """Raise `error`, or list the sample."""
        if self.on_damage == "raise":
            raise error
        if document in self.samples:
            return
        self.samples[document] = sample
        logger.warning("left out sample %d: %s", len(self.samples), sample.reason)
        refuse_link(str(self.file.parent))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # One short write in append mode is not mixed with those of other processes.
        with open(self.file, "ab", buffering=0, opener=open_unlinked) as file:
            file.write((json.dumps(asdict(sample)) + "\n").encode())
