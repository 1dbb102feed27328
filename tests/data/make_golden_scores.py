"""Write the golden score manifest and sidecar of version 1: python -m tests.data.make_golden_scores

Run it for a new version only, into a new folder: what version 1 wrote must stay readable.
"""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from schemas.distribution_rule import DistributionRule
from schemas.sidecar import (
    ScoreManifest,
    ShardLosses,
    SidecarRecord,
    TeacherRule,
    encode_score_manifest,
    encode_sidecar,
    score_manifest_name,
    sidecar_name,
)
from schemas.stored_distributions import TopTokens

FOLDER = Path(__file__).with_name("golden_scores_v1")
SHARD = "golden-000000-of-000001.tar"


DISTRIBUTIONS = (
    None,
    DistributionRule(3, 0.9, 151_665, "uint8"),
    DistributionRule(2, 1.0, 500, "float16"),
)


def golden_scores(
    distributions: DistributionRule | None = None,
) -> tuple[ShardLosses, ScoreManifest]:
    """Return losses with every case: no context, no document's tokens, 0, fp16's edges."""
    rule = TeacherRule(
        weights_sha256=sha256(b"weights").hexdigest(),
        dtype="bfloat16",
        tokenizer_sha256=sha256(b"tokenizer").hexdigest(),
        context={
            "teacher_seq_length": 1984,
            "first_token_id": None,
            "continued_token_id": 151643,
            "seq_length": 2048,
            "student_added_tokens": [1, 1, 1],
            "stride": None,
        },
        distributions=distributions,
    )
    losses = np.array([np.nan, 2.5, 0.0, 6e-8, np.nan, 65504.0, 1.0009765625], np.float16)
    starts = np.array([0, 4, 4, 7], np.int64)
    scores = ShardLosses(losses, starts, rule.fingerprint, sha256(b"shard").hexdigest())
    if distributions is not None:
        scores = replace(scores, entries=_top_tokens(starts, distributions).pack(starts))
    data = encode_sidecar(scores)
    record = SidecarRecord(
        file=sidecar_name(SHARD, rule.fingerprint),
        num_bytes=len(data),
        sha256=sha256(data).hexdigest(),
        shard=SHARD,
        num_tokens=7,
        num_losses=5,
        loss_sum=float(np.nansum(losses.astype(np.float64))),
        num_split_documents=0,
        context_sha256=sha256(b"").hexdigest(),
        entries=None if scores.entries is None else scores.entries.describe(),
    )
    dataset = sha256(b"dataset").hexdigest()
    return scores, ScoreManifest(dataset, rule, "golden/teacher", (record,))


def _top_tokens(starts: np.ndarray, rule: DistributionRule) -> TopTokens:
    """Return one position without context, a certain token, ties, and what no range holds."""
    top = TopTokens.empty(starts, rule)
    probabilities = [[1.0, 0, 0], [0.5, 0.25, 0.125], [0.5, 0.45, 0.01], [0.25, 0.25, 0.25]]
    log_probs = np.log(np.array(probabilities, np.float32), where=np.array(probabilities) > 0,
        out=np.full((4, 3), -np.inf, np.float32))  # fmt: skip
    log_probs = np.concatenate([log_probs, [[-1e-3, -30, -70_000]], log_probs[1:3]])
    ids = np.arange(21).reshape(7, 3) * 23 + 7
    ids[:, 0] = rule.vocab_size - 1 - np.arange(7)
    top.put(np.array([1, 2, 3, 4, 6, 7, 8]), ids[:, : rule.top_k], log_probs[:, : rule.top_k])
    return top


def main() -> None:
    """Write the files that aren't there."""
    FOLDER.mkdir(exist_ok=True)
    for distributions in DISTRIBUTIONS:
        scores, manifest = golden_scores(distributions)
        for name, data in (
            (manifest.sidecars[0].file, encode_sidecar(scores)),
            (score_manifest_name(scores.teacher), encode_score_manifest(manifest)),
        ):
            if not (FOLDER / name).exists():
                (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
