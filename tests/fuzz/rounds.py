"""The first half: one tokenizer a round, in a process of its own, which may crash or hang."""

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tokenizers

from pipeline.tokenization import SpecialStrings, Tokenizer, TokenizerError, load_tokenizer
from tests.fuzz.oracle import Oracle
from tests.fuzz.report import Fault, Report
from tests.fuzz.texts import make_text
from tests.fuzz.tokenizers import REAL, SMALL, write_fresh
from tests.support.datasets import byte_level
from tests.support.tokenizer_zoo import source

REAL_SECONDS, OTHER_SECONDS, SHRINK_SECONDS = 6.0, 1.0, 5.0
SILENT_SECONDS = 120.0  # then a round hangs; a sweep of a large tokenizer takes a sixth


@dataclass(frozen=True)
class Target:
    """A tokenizer and how it is loaded."""

    name: str
    path: str
    special_strings: SpecialStrings = "plain"
    fast: bool = True

    def load(self) -> Oracle:
        """Return what compares it."""
        load = partial(load_tokenizer, self.path, special_strings=self.special_strings)
        return Oracle(load(fast=self.fast), load(fast=False))


def fuzz_tokenizers(seed: str, until: float, report: Report) -> None:
    """Try one tokenizer after another until `time.monotonic` says that it is enough."""
    Oracle(byte_level(400), byte_level(400)).find_faults(["compiles kernels for all rounds, é"])
    while time.monotonic() < until:
        own = f"{seed} tokenizer {report.counts['tokenizers']}"
        _watch(draw_target(own, report.folder), own, report)
        report.counts["tokenizers"] += 1


def draw_target(seed: str, folder: Path) -> Target:
    """Return the tokenizer of a round: a real one, one of the tests', or one that is new."""
    choose = random.Random(seed)
    kind = choose.random()
    name = choose.choice(REAL if kind < 0.2 else SMALL) if kind < 0.3 else "fresh"
    fast = name != "fresh" or choose.random() < 0.6  # a new way to split is compared first, 5 s
    if name == "fresh":
        path = write_fresh(seed, folder / "tokenizers" / seed.replace(" ", "-"))
        is_json = path.suffix == ".json"
        name += "-" + (
            json.loads(path.read_bytes())["model"]["type"] if is_json else "SentencePiece"
        )
    else:
        path = source(name)
    honoured = choose.random() < 0.5 and path.suffix not in (".v1", ".v7", ".model")
    return Target(name, str(path), "honoured" if honoured else "plain", fast)


def run_round(target: Target, seed: str, told: Connection) -> None:
    """Try texts on a tokenizer for some seconds; tell what is tried and what went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print panics, which are counted
    try:
        oracle = target.load()
    except TokenizerError:
        told.send(("counts", {"tokenizers refused": 1}))
    except BaseException as error:
        told.send(("fault", Fault("load", f"{type(error)}: {error}"), [""]))
    else:
        if (fault := find_cut_template(target, oracle.tested)) is not None:
            told.send(("fault", fault, [""]))
        seconds = REAL_SECONDS if target.name in REAL else OTHER_SECONDS
        hunt(oracle, random.Random(seed), seconds, told.send)
        told.send(("counts", oracle.counts))


def find_cut_template(target: Target, loaded: Tokenizer) -> Fault | None:
    """Compare what comes before a text with what the library puts there, however many tokens."""
    path = Path(target.path)
    if path.suffix != ".json" or "model" not in json.loads(path.read_bytes()):
        return None  # Tekken's files are JSON, too
    library = tokenizers.Tokenizer.from_file(target.path)
    library.no_truncation()
    library.no_padding()
    plain, whole = (library.encode("x", add_special_tokens=add).ids for add in (False, True))
    starts = (place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
    before = tuple(whole[: next(starts, 0)])
    if loaded.template_before == before:
        return None
    return Fault("template", f"{loaded.template_before} before a text, the library's is {before}")


def hunt(
    oracle: Oracle, choose: random.Random, seconds: float, tell: Callable[[Any], object]
) -> None:
    """Try texts for some seconds from the first answer on; the first fault of a kind is shrunk."""
    strings = [*oracle.added.values()]
    pieces = list(oracle.tested.base_vocabulary().values())
    strings += [p.decode("utf-8", "ignore") for p in choose.sample(pieces, min(60, len(pieces)))]
    found: set[str] = set()
    until = float("inf")
    while time.monotonic() < until:
        texts = [make_text(choose, strings) for _ in range(choose.choice((1, 10, 50)))]
        if choose.random() < 0.01:  # some are tokenized in pieces
            texts = [" ".join(texts * 50)[: 800 << 10]]
        tell(("trying", texts))
        for place, fault in oracle.find_faults(texts).items():
            oracle.counts["faults"] += 1
            if fault.kind not in found:
                tell(("fault", fault, shrink_fault(oracle, fault, texts, place)))
            found.add(fault.kind)
        until = min(until, time.monotonic() + seconds)


def shrink_fault(oracle: Oracle, fault: Fault, texts: Sequence[str], place: int) -> list[str]:
    """Return the text at a place, less what it need not hold to fail; all where it fails not alone.

    Halves of it leave, then quarters, at last single characters.
    """
    until = time.monotonic() + SHRINK_SECONDS

    def fails(text: str) -> bool:
        return any(found.kind == fault.kind for found in oracle.find_faults([text]).values())

    kept = texts[place]
    alone = fails(kept)
    size = len(kept) // 2 if alone else 0
    while size and time.monotonic() < until:
        starts = range(0, len(kept), size)
        shorter = (kept[:start] + kept[start + size :] for start in starts)
        found = next((text for text in shorter if fails(text)), None)
        kept, size = (found, min(size, len(found))) if found is not None else (kept, size // 2)
    return [kept] if alone else list(texts)


def replay(body: dict[str, Any]) -> int:
    """Try the texts of a failure again, say what is wrong with them, return the exit status."""
    target, texts = Target(**body["target"]), body["texts"]
    try:
        oracle = target.load()
    except BaseException as error:  # a panic of a Rust library
        print(f"{target.path} does not load: {type(error)}: {error}")
        return 1
    faults = oracle.find_faults(texts)
    for place, fault in faults.items():
        print(f"{texts[place]!r}: {fault.kind}: {fault.detail}")
    return int(bool(faults))


def _watch(target: Target, seed: str, report: Report) -> None:
    """Run a round in a process; a crash or a hang is a fault of what it tried last."""
    tried: list[str] = [""]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_round, args=(target, seed, theirs), daemon=True)
    process.start()
    theirs.close()

    def add(fault: Fault, texts: Sequence[str]) -> None:
        report.add(fault, target.name, {"target": asdict(target), "texts": texts})

    with suppress(EOFError):
        while ours.poll(SILENT_SECONDS):
            kind, *values = ours.recv()
            if kind == "trying":
                (tried,) = values
            elif kind == "counts":
                report.counts.update(values[0])
            else:
                add(*values)
    process.join(10)
    process.kill()  # if it hangs
    process.join()
    if process.exitcode:
        add(Fault("dies", f"or hangs: exit code {process.exitcode}"), tried)
