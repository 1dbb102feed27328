"""How fast chats become shards, by the speed of plain texts with the same bytes.

    python benchmarks/chats.py [--rounds 3] [--megabytes 40] [--profile]

Conversations of three turns are cut from real text: questions of about 300 bytes, answers of about
1,500. Each is rendered by both sides' templates, which is proven, tokenized and aligned; plain
texts are the same messages, joined. The target is for `vocag align`, by the time that it reports
for aligning; then come the library's calls alone, without reading and writing files. The exit code
is 1 if the target is missed.
"""

import argparse
import cProfile
import os
import pstats
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import orjson
from align import find_tokenizer_file
from corpus import read_documents, write_corpus
from library_path import batches
from measure import Report, Times, measure, run_process

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.chats.chat_alignment import ChatSide, align_chats
from pipeline.chats.habits import Speaker, settle_speaker
from pipeline.chats.messages import Chat
from pipeline.chats.rendering import LearnRule
from pipeline.chats.templates import ChatTemplate
from pipeline.dataset.writing import ShardWriter
from pipeline.tokenization import SpecialStrings, Tokenizer, load_tokenizer

TEMPLATES = Path(__file__).resolve().parents[1] / "tests" / "data" / "chats"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
PAIRS = (("chatml", "qwen2_5"), ("llama3", "qwen3"), ("llama2", "gemma"))
SIZES = (300, 1500) * 3
"""Characters of a conversation's messages."""

Documents = Sequence[Sequence[SourceDocument]]


def cut_chats(text: str) -> list[Chat]:
    """Return a text as conversations of three questions and answers."""
    chats, at = list[Chat](), 0
    while at + sum(SIZES) <= len(text):
        messages = []
        for number, size in enumerate(SIZES):
            role = "assistant" if number % 2 else "user"
            messages.append({"role": role, "content": text[at : at + size].strip() or "?"})
            at += size
        chats.append(Chat(messages))
    return chats


def align_all(documents: Documents, sides: tuple[ChatSide, ChatSide], *, of_chats: bool) -> int:
    """Align and write batches of documents; return how many were."""
    writer = ShardWriter(BytesIO())
    count = 0
    for batch in documents:
        if of_chats:
            aligned = align_chats(batch, sides, LearnRule())
            assert not aligned.refused
        else:
            aligned = align_batch(batch, *(side.tokenizer for side in sides))
        writer.add(aligned)
        count += len(aligned.documents)
    writer.close()
    return count


def main() -> int:
    """Measure every pair of templates; return 1 if one is slower than half of the texts' speed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    parser.add_argument("--megabytes", type=float, default=40, help="text (default: 40)")
    parser.add_argument("--profile", action="store_true", help="say where the time of chats goes")
    options = parser.parse_args()
    report = Report()
    files = find_tokenizer_file("llama2"), find_tokenizer_file("qwen2_5")
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder), int(options.megabytes * 1e6))
        chats = cut_chats("".join(text.decode() for _, text in read_documents(corpus.files)))
        plain = [("".join(m["content"] for m in chat.messages)).encode() for chat in chats]
        print(f"{len(chats):,} chats, {sum(map(len, plain)) / 1e6:.1f} MB of text; "
              f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")  # fmt: skip
        jobs = _measure_jobs(Path(folder), chats, plain, files, options.rounds)
    for pair in PAIRS:
        report.say(f"vocag align, {pair[0]} and {pair[1]}", jobs.show(pair[0]))
        report.check("speed by the texts'", jobs.ratio("texts", pair[0]), least=0.5)
    report.say("vocag align, texts", jobs.show("texts"))
    texts, encoded = _documents(plain), _documents([chat.encode() for chat in chats])
    for pair in PAIRS:
        paths = (pair[0], files[0]), (pair[1], files[1])
        chats_of = partial(_prepare, paths, encoded, of_chats=True)
        if options.profile:
            _profile(chats_of())
        contenders = {"texts": partial(_prepare, paths, texts, of_chats=False), "chats": chats_of}
        times = measure(contenders, options.rounds)
        each = (f"{times.seconds(name) / len(chats) * 1e3:.2f}" for name in ("texts", "chats"))
        report.say(f"the library, {pair[0]} and {pair[1]}", "texts {}, chats {} ms".format(*each))
        report.say("speed by the texts'", f"{times.ratio('texts', 'chats'):.2f} x")
        cpu = (times.cpu_seconds(name) / len(chats) * 1e3 for name in ("texts", "chats"))
        report.say("CPU time, all threads", "texts {:.2f}, chats {:.2f} ms".format(*cpu))
    return 1 if report.missed else 0


def _measure_jobs(
    folder: Path, chats: Sequence[Chat], plain: Sequence[bytes], files: Sequence[Path], rounds: int
) -> Times:
    """Return the seconds that jobs report for aligning texts, and chats by each pair's student."""
    with (folder / "texts.jsonl").open("wb") as texts, (folder / "chats.jsonl").open("wb") as lines:
        for number, (chat, text) in enumerate(zip(chats, plain, strict=True)):
            name = f"chat-{number}"
            texts.write(orjson.dumps({"id": name, "text": text.decode()}) + b"\n")
            lines.write(orjson.dumps({"id": name, "messages": chat.messages}) + b"\n")
    commands: dict[str, list[str]] = {"texts": ["--input", f"{folder}/texts.jsonl"]}
    for pair in PAIRS:
        given = ["--input", f"{folder}/chats.jsonl", "--messages", "messages"]
        for side, name in zip(("student", "teacher"), pair, strict=True):
            given += ["--chat-template", f"{side}={TEMPLATES / name}.jinja"]
        commands[pair[0]] = given
    seconds = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for name, given in commands.items():
            common = ["--student", str(files[0]), "--teacher", str(files[1]), "--workers", "1"]
            output = ["--output", f"{folder}/aligned"]
            printed = run_process(["-m", "vocag", "align", *given, *common, *output])
            shutil.rmtree(folder / "aligned")
            found = re.search(r"aligning +(?:(\d+) min )?([\d.]+) s", printed)
            assert found, printed
            seconds[name].append(60 * int(found[1] or 0) + float(found[2]))
    return Times(seconds, {})


def _documents(texts: Sequence[bytes]) -> Documents:
    every = batches((f"chat-{n}", text) for n, text in enumerate(texts))
    return [[SourceDocument(name, text) for name, text in batch] for batch in every]


def _prepare(
    paths: Sequence[tuple[str, Path]], given: Documents, *, of_chats: bool
) -> Callable[[], object]:
    """Return what is timed: fresh tokenizers, which haven't seen the text."""
    strings: SpecialStrings = "honoured" if of_chats else "plain"  # as the job reads them
    student, teacher = (_side(*each, strings) for each in paths)
    align_all([given[0][:8]], (student, teacher), of_chats=of_chats)  # loads kernels
    return lambda: align_all(given, (student, teacher), of_chats=of_chats)


def _side(template: str, file: Path, strings: SpecialStrings) -> ChatSide:
    tokenizer: Tokenizer = load_tokenizer(str(file), special_strings=strings, proven=True)
    text = (TEMPLATES / f"{template}.jinja").read_text()
    speaker: Speaker = settle_speaker(ChatTemplate(text, NAMES), ("<s>", "</s>"), side="student")
    return ChatSide(tokenizer, speaker)


def _profile(run: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(run)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    sys.exit(main())
