"""Distributions in the student's vocabulary, against exhaustive sums and against offsets."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset.webdataset_documents import decoded_documents
from pipeline.distributions.kernels import Entries
from pipeline.distributions.mapping import empty_entries, map_batch, map_row
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.distributions.walk import RowFields
from pipeline.streaming import AlignedRows, Reading, StreamConfig, dataset_rows
from schemas.manifest import ConventionRecord
from tests.support import teaching, tokenizer_zoo
from tests.support.datasets import build_dataset, make_texts
from tests.support.mapped_distributions import (
    ByteTokenizer,
    SeededLosses,
    label_places,
    longest_prefix,
    mapped_by_label,
    naive_boundary,
    naive_inside,
    naive_target,
    next_token,
    readable_entries,
    with_own,
)

NOTHING = ConventionRecord(None, None, None)
ENDED = ConventionRecord(0, 0, 0)  # id 0 is before and after every text


def byte_vocabularies(alphabet=b"abc"):
    """Vocabularies of all bytes of an alphabet, some longer entries, and an end token, id 0."""
    more = st.lists(st.binary(min_size=2, max_size=4), max_size=12, unique=True)
    spelled = more.map(lambda es: [bytes(alphabet[b % len(alphabet)] for b in e) for e in es])
    return spelled.map(lambda es: [b"", *(bytes([b]) for b in alphabet), *es])


def one_row(student_ids, teacher_ids, student, teacher):
    """A row of one document between two end tokens on the student's side, one on the teacher's."""
    s_ends = np.cumsum([len(student[i]) for i in student_ids])
    t_ends = np.cumsum([len(teacher[i]) for i in teacher_ids])
    spans = np.zeros((len(student_ids) + 2, 2), np.int32)
    for place, end in enumerate(s_ends):
        start = end - len(student[student_ids[place]])
        spans[place] = (
            np.searchsorted(t_ends, start, side="right") + 1,
            np.searchsorted(t_ends, end, side="left") + 2,
        )
    mask = np.ones(len(spans), np.float32)
    mask[-1] = 0
    return {
        "input_ids": np.array([0, *student_ids, 0], np.int32),
        "loss_mask": mask,
        "teacher_spans": spans,
        "teacher_input_ids": np.array([0, *teacher_ids], np.int32),
        "cu_seqlens": np.array([0, len(spans)], np.int32),
        "teacher_cu_seqlens": np.array([0, len(teacher_ids) + 1], np.int32),
    }


def as_dict(ids, probs):
    assert (np.diff(probs) <= 0).all()
    assert len(set(ids[ids >= 0].tolist())) == (ids >= 0).sum()
    assert not probs[ids < 0].any()
    assert probs.sum() <= 1 + 1e-6
    return dict(zip(ids[ids >= 0].tolist(), probs[ids >= 0].tolist(), strict=True))


def mapped_labels(student, teacher, text, seed, top_k=None, known=1.0):
    """Return what a teacher's entries become at each label of a text, and what is true of it.

    All entries, or the likeliest `top_k`; losses where they are known. A student's tokens are any
    of those of equal bytes.
    """
    rng = np.random.default_rng(seed)
    s_tok, t_tok = ByteTokenizer(student, 0), ByteTokenizer(teacher, 0)
    tables = VocabularyMap.of(s_tok, t_tok, student_convention=ENDED, teacher_convention=ENDED)
    s_ids, t_ids = s_tok.segment(text), t_tok.segment(text)
    s_ids = [
        rng.choice([t for t in range(len(student)) if student[t] == student[i]]) for i in s_ids
    ]
    row = one_row(s_ids, t_ids, student, teacher)
    probs = rng.dirichlet(np.full(len(teacher), 0.3), len(t_ids) + 1)
    ids = np.argsort(-probs, axis=1)[:, :top_k].astype(np.int32)
    stored = np.take_along_axis(probs, ids, 1)
    losses = -np.log(probs[range(len(t_ids)), t_ids])
    losses[rng.random(len(losses)) >= known] = np.nan
    row["teacher_losses"] = np.append(np.nan, losses).astype(np.float32)
    out = empty_entries(len(row["input_ids"]), ids.shape[1] + 1)
    expected = Entries(
        np.pad(ids, ((0, 0), (0, 1)), constant_values=-1),
        np.pad(stored, ((0, 0), (0, 1))).astype(np.float32),
        ids.shape[1] + 1,
    )
    map_row(RowFields(**row), expected, tables, out)
    assert (out.ids[-1] == -1).all()
    starts = np.cumsum([0, *(len(teacher[i]) for i in t_ids)]).tolist()
    s_starts = np.cumsum([0, *(len(student[i]) for i in s_ids)]).tolist()
    shared = set(starts[1:-1]) & set(s_starts[1:-1])
    labels = []
    for place, (byte, label) in enumerate(zip(s_starts, [*s_ids, 0], strict=True)):
        state = int(np.searchsorted(starts, byte, side="right")) - 1
        own = (t_ids[state], losses[state]) if label else None
        labels.append(
            SimpleNamespace(
                label=int(label),
                found=as_dict(out.ids[place], out.probs[place]),
                own_id=int(out.own_ids[place]),
                prefix=text[starts[state] : byte],
                rest=text[byte : starts[state + 1]] if label else b"",
                exact=with_own(ids[state], stored[state], own),
                probs=probs[state],
                # Else nothing says that the segment starts on the teacher's token.
                confirmed=shared or not label,
            )
        )
    return labels


LABELS = {
    "student": byte_vocabularies(),
    "teacher": byte_vocabularies(),
    "text": st.lists(st.sampled_from(b"abc"), min_size=1, max_size=24).map(bytes),
    "seed": st.integers(0, 1000),
}


@settings(deadline=None, max_examples=200)
@given(**LABELS)
def test_everything_stored_gives_the_exact_sums(student, teacher, text, seed):
    everything = np.arange(len(teacher))
    for at in mapped_labels(student, teacher, text, seed):
        if at.prefix:
            expected = naive_inside(student, teacher, at.prefix, everything, at.probs)
        else:
            expected = naive_boundary(student, teacher, ({0}, 0), everything, at.probs)
            assert sum(expected.values()) == pytest.approx(1)  # every byte is a student token
        expected = {to: mass for to, mass in expected.items() if mass > 1e-7 and at.confirmed}
        found = {to: mass for to, mass in at.found.items() if mass > 1e-7}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(deadline=None, max_examples=200)
@given(**LABELS, top_k=st.integers(1, 5), known=st.sampled_from([1.0, 0.5]))
def test_of_few_entries_the_text_s_own_token_counts_by_its_loss(
    student, teacher, text, seed, top_k, known
):
    for at in mapped_labels(student, teacher, text, seed, top_k, known):
        if not at.confirmed:
            expected = {}
        elif at.prefix:
            expected = naive_inside(student, teacher, at.prefix, *at.exact)
        else:
            expected = naive_boundary(student, teacher, ({0}, 0), *at.exact)
        assert at.found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        own = longest_prefix(student, at.rest) if at.label else 0
        assert at.own_id == (own if at.found else -1)


PAIRS = [
    ("llama_like", "qwen_like"),
    ("qwen_like", "llama_like"),
    ("gpt2_like", "sentencepiece_bpe"),
    ("sentencepiece_unigram", "gpt2_like"),
    ("unigram", "byte_incomplete"),
    ("byte_incomplete", "nfc"),
    ("nfc", "sentencepiece_nfkc"),
    ("sentencepiece_nfkc", "unigram"),
    ("lower_case", "qwen_like"),
    ("sentencepiece_bpe", "llama_like"),
    ("bytes", "sentencepiece_unigram"),
]


@pytest.fixture(params=PAIRS, ids="-".join)
def zoo(request, tmp_path):
    student, teacher = (tokenizer_zoo.load(name, fast=False) for name in request.param)
    texts = make_texts(12) + [
        (f"more-{n}", text) for n, text in enumerate([" led", "  two", "\nline", "é", "x" * 90])
    ]
    manifest = build_dataset(tmp_path / "data", texts, student=student, teacher=teacher)
    documents = [sample["document"] for sample in decoded_documents(str(tmp_path / "data"))]
    return SimpleNamespace(
        name=request.param[0],
        student=student,
        teacher=teacher,
        manifest=manifest,
        documents=documents,
        path=str(tmp_path / "data"),
        entries=readable_entries(student, teacher),
    )


def open_rows(zoo, **options):
    return AlignedRows(StreamConfig(Reading(zoo.path, **options), seq_length=48))


def open_map(rows, zoo):
    return VocabularyMap.of(
        zoo.student,
        zoo.teacher,
        student_convention=rows.rules.student,
        teacher_convention=rows.rules.teacher,
    )


@pytest.mark.parametrize(
    "around", [{}, {"student_bos": "none", "student_eos": "none", "teacher_context": "none"}]
)
def test_real_tokenizers_give_what_offsets_say(zoo, around):
    rows = open_rows(zoo, **around)
    vocabulary_map = open_map(rows, zoo)
    plan, order = rows.datasets[0].plan, rows.datasets[0].order
    rng, k = np.random.default_rng(0), 6
    shape = (len(rows), rows.rules.teacher_seq_length, k)
    batch = rows.__getitems__(range(len(rows)))
    # The text's own next token and any others, all different.
    coming = np.roll(batch["teacher_input_ids"].numpy(), -1, axis=1)
    first = np.where(rng.random(shape[:2]) < 0.5, coming, rng.integers(0, 1000, shape[:2]))
    ids = ((first[..., None] + 37 * np.arange(k)) % zoo.teacher.vocab_size).astype(np.int32)
    probs = -np.sort(-rng.dirichlet(np.ones(k + 1), shape[:2]), axis=-1)[..., :k]
    losses = rng.exponential(1.0, shape[:2]).astype(np.float32)
    free = ((0, 0), (0, 0), (0, 1))
    given = np.pad(ids, free, constant_values=-1), np.log(np.pad(probs, free, constant_values=1))
    out_ids, out_probs, own_ids = map_batch(
        batch, given[0], given[1].astype(np.float32), vocabulary_map, losses, exact=k + 1
    )
    ends = {zoo.teacher.eos_token_id, rows.rules.teacher.end_token_id} - {None}
    end = rows.rules.student.end_token_id
    seen, wanted, contradicted = 0, 0, 0
    for position in range(len(rows)):
        written = out_ids[position, :, 0] >= 0
        for at, document, token, state, j, boundary in label_places(
            plan, order.row_index(0, position), zoo.documents
        ):
            wanted += boundary
            if not written[at]:
                continue
            written[at] = False
            found = as_dict(out_ids[position, at], out_probs[position, at])
            own = next_token(document, token, j, state, losses[position])
            entry = with_own(ids[position, state], probs[position, state], own)
            to = (ends, -1 if end is None else end)
            if boundary:
                seen += 1
                sides = ("", *(("student", "teacher", "unspaced") if token == 0 else ()))
                options = [naive_boundary(*zoo.entries, to, *entry, before=side) for side in sides]
                if token:
                    target = naive_target(*zoo.entries, to, own[0])
                    assert own_ids[position, at] == target
                    contradicted += target != document.student.input_ids[token]
            else:
                spelled = zoo.teacher.token_bytes(document.teacher.input_ids[j])
                back = int(
                    document.teacher.byte_offsets[j, 1] - document.student.byte_offsets[token, 0]
                )
                prefix, rest = spelled[: len(spelled) - back], spelled[len(spelled) - back :]
                options = [naive_inside(*zoo.entries, prefix, *entry)]
                assert own_ids[position, at] == longest_prefix(zoo.entries[0], rest)
            assert any(found == pytest.approx(each, rel=1e-4) for each in options)
        assert not written.any()  # nothing where the offsets say nothing
    assert seen > 0.8 * wanted
    assert (own_ids[out_ids[..., 0] < 0] == -1).all()
    assert (contradicted > 50) == (zoo.name not in ("lower_case", "bytes"))


@pytest.mark.parametrize("teacher_name", ["qwen_like", "llama_like"])
def test_a_byte_student_s_distributions_are_marginals(tmp_path, teacher_name):
    """All of a teacher's mass, summed over its tokens by the byte that comes next."""
    student, teacher = (tokenizer_zoo.load(n, fast=False) for n in ("bytes", teacher_name))
    build_dataset(tmp_path, make_texts(6), student=student, teacher=teacher)
    documents = [sample["document"] for sample in decoded_documents(str(tmp_path))]
    rows = AlignedRows(StreamConfig(Reading(str(tmp_path)), seq_length=96))
    batch, plan = rows.__getitems__(range(len(rows))), rows.datasets[0].plan
    # Half of the mass is on the token that comes, so that what goes on from its bytes is stored.
    size, rng = teacher.vocab_size, np.random.default_rng(0)
    probs = rng.dirichlet(np.full(size, 0.1), batch["teacher_input_ids"].shape) / 2
    coming = np.roll(batch["teacher_input_ids"].numpy(), -1, axis=1)
    np.put_along_axis(probs, coming[..., None], 0.5, axis=-1)
    probs /= probs.sum(-1, keepdims=True)
    ids = np.broadcast_to(np.arange(size, dtype=np.int32), probs.shape).copy()
    vocabulary_map = VocabularyMap.of(student, teacher)
    with np.errstate(divide="ignore"):
        log_probs = np.log(probs).astype(np.float32)
    unknown = np.full(ids.shape[:2], np.nan, np.float32)
    free = ((0, 0), (0, 0), (0, 1))
    ids = np.pad(ids, free, constant_values=-1)
    out_ids, out_probs, _ = map_batch(
        batch, ids, np.pad(log_probs, free), vocabulary_map, unknown, exact=size + 1
    )
    spelled = [teacher.token_bytes(token) for token in range(size)]
    seen, wanted = Counter(), Counter()
    for position in range(len(rows)):
        row = rows.datasets[0].order.row_index(0, position)
        for at, document, byte, state, j, boundary in label_places(plan, row, documents):
            if byte is None or (teacher_name == "llama_like" and j == 0):
                continue  # the end, and what a space that is not in the text comes before
            read = document.text[document.teacher.byte_offsets[j, 0] : byte]
            expected = Counter()
            for text, mass in zip(spelled, probs[position, state], strict=True):
                if text.startswith(read) and len(text) > len(read):
                    expected[text[len(read)]] += mass
            ending = sum(probs[position, state, t] for t in range(size) if spelled[t] == read)
            whole = 1 if boundary else expected.total()
            wanted[boundary] += boundary or ending < 0.1 * (whole + ending)
            found = as_dict(out_ids[position, at], out_probs[position, at])
            found.pop(student.eos_token_id, None)
            found = {to: mass for to, mass in found.items() if mass > 1e-12}
            if found:
                seen[boundary] += 1
                assert bytes([document.text[byte]])[0] in found
                kept = {to: mass / whole for to, mass in expected.items() if mass / whole > 1e-12}
                assert found == pytest.approx(kept, rel=1e-4)
    assert all(seen[kind] > 0.9 * wanted[kind] > 50 for kind in (True, False)), (seen, wanted)


@pytest.mark.parametrize(
    "around", [{}, {"student_bos": "none", "student_eos": "none", "teacher_context": "none"}]
)
def test_rows_hold_what_is_stored_for_their_places(tmp_path, monkeypatch, around):
    student, teacher = (tokenizer_zoo.load(n, fast=False) for n in ("qwen_like", "byte_incomplete"))
    build_dataset(tmp_path, make_texts(12), student=student, teacher=teacher)
    documents = [sample["document"] for sample in decoded_documents(str(tmp_path))]
    losses = SeededLosses(teacher.vocab_size)
    monkeypatch.setattr(dataset_rows, "open_teachers", lambda *_, **__: losses)
    given = {"seq_length": 48, "stored_losses": "t", **around}
    rows = teaching.open_rows(tmp_path, with_distributions=True, **given)
    batch = rows.__getitems__(range(len(rows)))
    assert batch["next_token_ids"].shape == (len(rows), 48, 6)
    plain = teaching.open_rows(tmp_path, **given)
    for name, values in plain.__getitems__(range(len(rows))).items():
        assert torch.equal(batch[name].nan_to_num(), values.nan_to_num())
    number = {document.document_id: place for place, document in enumerate(documents)}

    def stored(document, position):
        return losses.entries(number[document.document_id], position)

    end = rows.rules.student.end_token_id
    ends = ({teacher.eos_token_id} - {None}, -1 if end is None else end)
    entries, seen = readable_entries(student, teacher), 0
    for _, kind, found, expected in mapped_by_label(rows, batch, documents, stored, entries, ends):
        if found and kind != "inside":
            assert found == pytest.approx(expected, rel=1e-4)
            seen += 1
    assert seen > 0.8 * int(batch["loss_mask"].sum()) - len(rows)


def test_distributions_without_losses_are_refused():
    with pytest.raises(ValueError, match="give teaching some stored_losses"):
        StreamConfig(Reading("aligned"), seq_length=8, with_distributions=True)


def test_words_without_bytes_are_refused():
    words, bytes_ = (tokenizer_zoo.load(name, fast=False) for name in ("word_pieces", "qwen_like"))
    with pytest.raises(ValueError, match="don't spell a text"):
        VocabularyMap.of(words, bytes_)
