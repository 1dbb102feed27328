"""A manifest without files, whose every field holds something."""

from dataclasses import replace

from schemas.manifest import DeadLetterRecord, Manifest, ShardRecord, TokenizerRecord

STUDENT = TokenizerRecord(
    source="owner/student",
    file="tokenizers/student/tokenizer.json",
    sha256="a" * 64,
    vocab_size=32000,
    special_strings="plain",
    bos_token_id=1,
    eos_token_id=2,
    adds_bos=True,
    adds_eos=False,
)
TEACHER = replace(
    STUDENT,
    source="owner/teacher",
    file="tokenizers/teacher/tokenizer.model",
    sha256="b" * 64,
    bos_token_id=None,
    eos_token_id=None,
    adds_bos=False,
)
SHARDS = tuple(
    ShardRecord(
        file=f"docs-{number:06d}-of-000002.tar",
        num_bytes=2048,
        sha256=f"{number}" * 64,
        index_file=f"docs-{number:06d}-of-000002.index.parquet",
        index_num_bytes=700,
        index_sha256="c" * 64,
        num_documents=3 + number,
        num_text_bytes=300,
        num_student_tokens=80,
        num_teacher_tokens=70,
    )
    for number in range(2)
)
MANIFEST = Manifest(
    name="docs",
    student=STUDENT,
    teacher=TEACHER,
    shards=SHARDS,
    dead_letters=DeadLetterRecord("dead_letters.jsonl", "d" * 64, 2, {"empty_text": 2}),
    configuration={"input": ["in/*.jsonl"], "naïve": "数"},
    statistics={"num_documents": 7},
)
