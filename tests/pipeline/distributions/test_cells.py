"""Which tokens stand for each other, counted again in plain Python, and what a student learns."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from pipeline.dataset.chosen_documents import ChosenDocuments, select_documents
from pipeline.dataset.files import open_dataset
from pipeline.dataset.webdataset_documents import decoded_documents
from pipeline.distributions.cells import (
    NoSharedStartError,
    count_cells,
    describe_cell,
    largest_cells,
)
from pipeline.distributions.mapping import map_batch
from pipeline.distributions.pair import look_at_pair
from pipeline.distributions.prefixes import find_prefixes
from pipeline.distributions.sample import sample_documents
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.divergences import LabelDistributions, distilled_loss
from pipeline.packing.state import StreamMismatchError
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.tokenization import load_tokenizer
from schemas.distribution_rule import EntryShape
from tests.support import tokenizer_zoo
from tests.support.datasets import build_dataset, flip, make_texts
from tests.support.mapped_distributions import longest_prefix, readable_entries

SHARED = Path(__file__).parents[4] / "shared/tokenizers"


def digits_and_words(count=120):
    """Texts with numbers, indents and words."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        a, b = rng.integers(1, 3000, 2).tolist()
        lines.append(f"In {a} we had {b} apples,\n    def f{a % 7}(x):\n        return x + {b}\n")
    return [(f"text-{n}", "".join(lines[n : n + 6])) for n in range(0, count, 6)]


@pytest.fixture(scope="module", params=[("llama_like", "qwen_like"), ("qwen_like", "bytes")])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells") / "data"
    student, teacher = (tokenizer_zoo.load(name, fast=False) for name in request.param)
    texts = digits_and_words() + make_texts(10)
    build_dataset(folder, texts, student=student, teacher=teacher, num_shards=3)
    return folder, student, teacher


def counted_slowly(folder, student, teacher):
    """The same cells by offsets, counters and sets."""
    own, other = readable_entries(student, teacher)
    pairs, of_rest, of_label, targets = Counter(), Counter(), Counter(), {}
    for sample in decoded_documents(str(folder)):
        document = sample["document"]
        for token in range(len(document.student)):
            byte = int(document.student.byte_offsets[token, 0])
            j = int(np.searchsorted(document.teacher.byte_offsets[:, 1], byte, side="right"))
            if not token or j == 0:
                continue
            start = int(document.teacher.byte_offsets[j, 0])
            t, s = int(document.teacher.input_ids[j]), int(document.student.input_ids[token])
            stop = byte + len(own[s])
            if (
                own[s] != document.text[byte:stop]
                or other[t] != document.text[start:][: len(other[t])]
            ):
                continue  # rewritten by a normaliser
            rest = other[t][byte - start :]
            pairs[rest, s] += 1
            of_rest[rest] += 1
            of_label[s] += 1
            targets[rest] = longest_prefix(own, rest)
    groups = {s: {s} for s in range(student.vocab_size)}
    for (rest, s), count in pairs.items():
        often = count > 0.02 * of_rest[rest] or count > 0.02 * of_label[s]
        if count >= 2 and often and targets[rest] >= 0:
            joined = groups[s] | groups[targets[rest]]
            for each in joined:
                groups[each] = joined
    return [min(groups[s]) for s in range(student.vocab_size)], pairs


def ruled_out_slowly(folder, student, cells):
    """The same pairs of tokens: those that never stand side by side, but are written as one."""
    counts, beside = Counter(), set()
    for sample in decoded_documents(str(folder)):
        ids = sample["document"].student.input_ids.tolist()
        counts.update(ids)
        beside.update((a, cells[b]) for a, b in pairwise(ids))
    entries, _ = readable_entries(student, student)
    tokens = {entry: token for token, entry in enumerate(entries) if entry}
    return {
        (tokens[entry[:at]], tokens[entry[at:]])
        for token, entry in enumerate(entries)
        for at in range(1, len(entry))
        if counts[token] >= 2
        and entry[:at] in tokens
        and entry[at:] in tokens
        and (tokens[entry[:at]], cells[tokens[entry[at:]]]) not in beside
    }


def test_cells_are_those_that_offsets_count(world):
    folder, student, teacher = world
    tables = VocabularyMap.of(student, teacher)
    found = count_cells(sample_documents([select_documents(open_dataset(folder))]), tables)
    expected, pairs = counted_slowly(folder, student, teacher)
    assert sum(pairs.values()) > 1000
    assert found.numbers.tolist() == expected
    num_cells = (np.bincount(found.numbers) > 1).sum()
    assert num_cells > 3, "several tokens stand for each other"
    assert look_at_pair(open_dataset(folder)).num_cells == num_cells
    divided = [divmod(code, student.vocab_size) for code in found.ruled_out.tolist()]
    assert divided == sorted(ruled_out_slowly(folder, student, expected))
    assert len(divided) > 30


def test_a_certain_teacher_gives_its_mass_to_the_label_s_cell(world):
    """At every label that learns a distribution, at a boundary and inside a token."""
    folder, _, teacher = world
    rows = AlignedRows(StreamConfig(Reading(str(folder)), seq_length=64))
    entries = [teacher.token_bytes(token) for token in range(teacher.vocab_size)]
    # Nothing starts inside a byte.
    some = 0.01 * (max(map(len, entries)) > 1)
    require_certain(rows, min_labels=1000, min_inside=some)


def require_certain(rows, *, min_labels, max_crossing=0.05, min_inside=0.01):
    """Check where a teacher's mass goes that gives every token of the text 0.97."""
    tables, p = vocabulary_map(rows), 0.97
    cells, num_taught, num_inside, num_crossing = Cells.of(*tables.cells), 0, 0, 0
    for position in range(len(rows)):
        batch = rows.__getitems__([position])
        tokens = batch["teacher_input_ids"].numpy()
        ids = np.full((*tokens.shape, 2), -1, np.int32)
        ids[:, :-1, 0] = tokens[:, 1:]
        log_probs = np.full(ids.shape, np.log(p), np.float32)
        losses = np.full(tokens.shape, -np.log(p), np.float32)
        found = map_batch(batch, ids, log_probs, tables, losses, exact=2)
        to, probs, own_ids = map(torch.from_numpy, found)
        known = LabelDistributions(to.long(), probs, own_ids.long(), EntryShape(2))
        known = known.in_cells(cells, batch["input_ids"])
        labels = batch["labels"].long()
        taught = known.can_teach(labels) & batch["loss_mask"].bool()
        taught &= batch["teacher_spans"][..., 1] > 0  # not at a document's end
        same = known.numbers_of(known.ids) == known.numbers_of(labels).unsqueeze(-1)
        mass = (known.probs * same).sum(-1)[taught]
        assert (mass > 0.96).all()
        num_taught += len(mass)
        num_inside += int((mass > 0.99).sum())
        num_crossing += int((known.is_known & ~taught).sum())
    assert num_taught > min_labels
    assert num_inside >= min_inside * num_taught
    assert num_crossing < max_crossing * num_taught


TABLE = "| year | sum |\n|---|---|\n" + "".join(f"| {1990 + n} | {n * 137} |\n" for n in range(60))
BLANKS = "".join(f"{' ' * (n % 17)}x{chr(10) * (n % 3)}{chr(9) * (n % 2)}{n}" for n in range(400))
REAL_PAIRS = [
    ("gpt_neox", "qwen2_5"), ("gemma3", "qwen2_5"), ("qwen2_5", "llama2"), ("qwen2_5", "gpt_neox"),
    ("llama2", "smollm2"), ("smollm2", "qwen2_5"), ("gpt_neox", "smollm2"), ("llama2", "qwen2_5"),
    ("falcon", "qwen2_5"), ("mistral", "deepseek_llm"), ("deepseek_llm", "gemma3"),
    ("phi3_mini", "falcon"),
]  # fmt: skip


def real_texts():
    """Mathematics, Python, a table, runs of blanks."""
    problems = (SHARED.parent / "data/benchmarks/gsm8k.jsonl").read_text("utf-8").splitlines()
    math = [json.loads(line) for line in problems[:150]]
    code = [*sorted(Path(json.__file__).parent.glob("*.py")), Path(__file__)]
    texts = [f"{each['question']}\n{each['answer']}" for each in math]
    return [*texts, *(path.read_text("utf-8") for path in code), *[TABLE, BLANKS] * 2]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/tokenizers")
@pytest.mark.parametrize("pair", REAL_PAIRS, ids="-".join)
def test_real_pairs_give_a_certain_teacher_s_mass_to_the_label_s_cell(pair, tmp_path):
    student, teacher = (load_tokenizer(str(SHARED / name)) for name in pair)
    texts = [(f"d{number}", text) for number, text in enumerate(real_texts())]
    build_dataset(tmp_path / "data", texts, student=student, teacher=teacher)
    rows = AlignedRows(StreamConfig(Reading(str(tmp_path / "data")), seq_length=512))
    require_certain(rows, min_labels=15_000, max_crossing=0.12, min_inside=0.005)


def test_a_sample_is_even_and_the_same_each_time(tmp_path, caplog):
    student, teacher = (tokenizer_zoo.load(name, fast=False) for name in ("llama_like", "bytes"))
    folder = tmp_path / "data"
    build_dataset(folder, make_texts(60), student=student, teacher=teacher, num_shards=4)
    dataset = open_dataset(folder)
    chosen = [ChosenDocuments(dataset)]
    whole = [row.input_ids.tolist() for row in sample_documents(chosen)]
    sizes = [record.num_documents for record in dataset.manifest.shards]
    assert len(whole) == sum(sizes)
    few = [row.input_ids.tolist() for row in sample_documents(chosen, num_tokens=2000)]
    assert few == [row.input_ids.tolist() for row in sample_documents(chosen, num_tokens=2000)]
    starts = np.cumsum([0, *sizes])
    assert {int(np.searchsorted(starts, whole.index(own), "right")) for own in few} == {1, 2, 3, 4}
    assert 2000 <= sum(map(len, few)) < 4000
    twice = list(sample_documents([*chosen, *chosen], num_tokens=2000))
    assert len(twice) % 2 == 0
    index = dataset.read_index(0)
    flip(folder / dataset.manifest.shards[0].file, int(index.payload_offset[0]) + 200)
    assert len(list(sample_documents(chosen))) == sum(sizes[1:])
    assert "cells are counted without the rest of a shard" in caplog.text


def test_a_checkpoint_goes_on_with_its_cells_or_not_at_all(world, monkeypatch):
    folder, _, _ = world
    config = StreamConfig(Reading(str(folder)), seq_length=64, with_cells=True)
    rows = AlignedRows(config)
    saved = rows.state(8)
    tables = vocabulary_map(rows)
    assert saved.cells == tables.cells.digest
    assert AlignedRows(config).restore(saved) == 8
    assert len(tables.cells.ruled_out)
    for name, other in (("numbers", np.arange(len(tables.cells.numbers))), ("ruled_out", [])):
        cells = tables.cells._replace(**{name: np.array(other, np.int64)})
        monkeypatch.setattr(
            "pipeline.streaming.rows.vocabulary_map",
            lambda _, cells=cells: replace(tables, cells=cells),
        )
        told = f"with cells {saved.cells}, this run has {cells.digest}"
        with pytest.raises(StreamMismatchError, match=told):
            AlignedRows(config).restore(saved)


def test_of_equal_tokens_the_one_that_is_written_counts(tmp_path):
    """GPT-NeoX has runs of spaces twice: as pieces, and as added tokens, which a text becomes."""
    spaces = AddedToken("  ", normalized=False)
    body = tokenizer_zoo.with_added(tokenizer_zoo.definition("qwen_like"), spaces)
    piece, added = body["model"]["vocab"]["ĠĠ"], body["added_tokens"][-1]["id"]
    student = load_tokenizer(str(tokenizer_zoo.write_definition(body, tmp_path)), fast=False)
    assert student.token_bytes(piece) == student.token_bytes(added) == b"  "
    assert student.tokenize_batch([b"  "]).input_ids.tolist() == [added]
    found = VocabularyMap.of(student, tokenizer_zoo.load("bytes", fast=False))
    text = np.frombuffer(b"  ", np.uint8)
    assert find_prefixes(text, np.array([0, 2]), found.tables).tolist() == [added]


def test_nothing_to_count_is_said():
    student, teacher = (tokenizer_zoo.load(name, fast=False) for name in ("llama_like", "bytes"))
    with pytest.raises(NoSharedStartError, match="no label of the sample starts at a byte"):
        count_cells([], VocabularyMap.of(student, teacher))


def test_cells_in_words():
    assert largest_cells(np.array([0, 1, 1, 3, 1, 3]), 5)[0].tolist() == [1, 2, 4]
    assert describe_cell([b"  ", b"    "]) == "spaces, 2 tokens"
    assert describe_cell([b"\n", b"\n\n "]) == "blanks, 2 tokens"
    assert describe_cell([b"(", b".\n"]) == "signs, 2 tokens"
    assert describe_cell([b"\n", b"\nx"]) == '"\\n" "\\nx", 2 tokens'


def test_the_best_student_believes_the_truth():
    """Numbers of one or two digits; the teacher writes digit by digit, the student whole numbers.

    A full-batch descent of the product's own loss, labels as often as they occur, ends at the
    truth: with a token for each prefix it doesn't.
    """
    counts = np.random.default_rng(0).multinomial(600, np.r_[[0.04] * 10, [0.6 / 90] * 90])
    numbers = np.flatnonzero(counts)
    digits = np.array([int(str(number)[0]) for number in range(100)])
    of_digit = np.bincount(digits, counts, minlength=10) / 600
    labels = torch.from_numpy(np.repeat(np.arange(100), counts))[None]
    first = torch.from_numpy(digits)[labels]
    shape = *labels.shape, 10
    found = {}
    for name in ("cells", "prefix"):
        known = LabelDistributions(
            torch.arange(10).expand(shape),
            torch.from_numpy(of_digit).expand(shape),
            first,
            EntryShape(10),
            Cells.of(digits) if name == "cells" else None,
        )
        logits = torch.zeros(100, 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [logits], max_iter=60, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
        )

        def step(known=known, logits=logits, optimizer=optimizer):
            optimizer.zero_grad()
            scores = linear_cross_entropy(
                torch.ones(*labels.shape, 1, dtype=torch.float64),
                logits,
                labels,
                entry_ids=known.asked_of(labels),
                cells=known.cells,
            )
            mask = torch.ones(labels.shape)
            result = distilled_loss(scores, known, labels, loss_mask=mask, weight=0.8)
            loss = result.loss_sum / result.num_tokens
            loss.backward()
            return loss

        optimizer.step(step)
        q = logits.detach()[:, 0].softmax(0).numpy()
        truth = counts[numbers] / 600
        found[name] = float(np.sum(truth * np.log(truth / q[numbers])))
    assert found["cells"] < 1e-6
    assert found["prefix"] > 0.1


def test_what_a_label_s_start_rules_out_goes_to_the_text_s_own_token():
    """After " 20" (0) comes a comma (2) or a word (3); the teacher expects a digit (1), too.

    On average over texts each gets what the teacher expects of it without the digit, of draws, too.
    """
    cells = Cells.of(np.arange(4), [0 * 4 + 1])
    before, ids = torch.tensor([[0, 3]]), torch.tensor([1, 2, 3, -1, 1])
    found = torch.zeros(2, 4)
    for own, share in ((2, 0.75), (3, 0.25)):
        known = LabelDistributions(
            ids.expand(1, 2, 5),
            torch.tensor([0.2, 0.45, 0.15, 0, 0.2]).expand(1, 2, 5),
            torch.full((1, 2), own),
            EntryShape(4, 1),
        ).in_cells(cells, before)
        assert known.cells is cells
        mass = torch.zeros(2, 5).scatter_add_(1, known.ids[0] % 5, known.probs[0])
        found += share * mass[:, :4]
    torch.testing.assert_close(found, torch.tensor([[0, 0, 0.75, 0.25], [0, 0.4, 0.45, 0.15]]))
    unknown = LabelDistributions(ids, torch.ones(5), torch.tensor(-1), EntryShape(5))
    assert unknown.in_cells(cells, torch.tensor(0)).ids.tolist() == ids.tolist()
