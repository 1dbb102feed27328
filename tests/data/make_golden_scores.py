"""Write the golden score manifest and sidecar of version 1: python -m tests.data.make_golden_scores

Run it for a new version only, into a new folder: what version 1 wrote must stay readable.
"""

from hashlib import sha256
from pathlib import Path

import numpy as np

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

FOLDER = Path(__file__).with_name("golden_scores_v1")
SHARD = "golden-000000-of-000001.tar"


def golden_scores() -> tuple[ShardLosses, ScoreManifest]:
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
    )
    losses = np.array([np.nan, 2.5, 0.0, 6e-8, np.nan, 65504.0, 1.0009765625], np.float16)
    starts = np.array([0, 4, 4, 7], np.int64)
    scores = ShardLosses(losses, starts, rule.fingerprint, sha256(b"shard").hexdigest())
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
    )
    dataset = sha256(b"dataset").hexdigest()
    return scores, ScoreManifest(dataset, rule, "golden/teacher", (record,))


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    scores, manifest = golden_scores()
    (FOLDER / manifest.sidecars[0].file).write_bytes(encode_sidecar(scores))
    (FOLDER / score_manifest_name(scores.teacher)).write_bytes(encode_score_manifest(manifest))


if __name__ == "__main__":
    main()
