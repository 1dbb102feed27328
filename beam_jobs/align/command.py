"""The work of `vocag align`."""

import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.align.configuration import Attempt, configure
from beam_jobs.align.dataset_making import make_dataset
from beam_jobs.align.dry_run import describe_job
from beam_jobs.align.inputs.input_identity import require_same_inputs
from beam_jobs.align.inputs.parts import STANDARD_INPUT
from beam_jobs.align.inputs.standard_input import remove_abandoned, spool_standard_input
from beam_jobs.align.opened_input import open_input
from beam_jobs.align.options import AlignOptions
from beam_jobs.generations import read_newest
from beam_jobs.hub_copies import input_here, output_here
from beam_jobs.job_errors import InputError, OptionsError
from beam_jobs.left_out import require_few_left_out
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.resuming import SUMMARY_FILE
from beam_jobs.running.clusters import require_cluster
from beam_jobs.running.runners import make_beam_options
from pipeline.command_line.option_parsing import option_names
from schemas.manifest import MANIFEST_FILE, Manifest


def align(options: AlignOptions, *, started: float | None = None) -> Manifest:
    """Make a dataset, unless it is finished already; return the manifest of what the options made.

    `started` is when the command began, by `time.monotonic()`; None means now.

    Raises:
        ValueError: the input, a tokenizer, an option or the output folder can't be used.
        NoAnswerError: an object store doesn't answer.
        JobError: the Beam job failed.
        TooManyDeadLettersError: too much of the input is left out.

    Example:
        >>> options = AlignOptions(("corpus/*.jsonl",), "aligned", "llama2", "qwen2_5")
        >>> align(options).totals["num_documents"]  # doctest: +SKIP
        1000
    """
    started = time.monotonic() if started is None else started
    with output_here(options.output, options.run.say) as output:
        return _align(replace(options, output=output), started)


def _align(options: AlignOptions, started: float) -> Manifest:
    options, beam_options = _settle(options)
    for place in (*options.input, options.output):
        storage.require_answer(place)
    lock = storage.join(options.output, OUTPUT_LOCK)
    hold = partial(hold_lock, lock, options.output)
    # A stream's job holds it while it copies, else another takes the copy for an abandoned one.
    of_stream = STANDARD_INPUT in options.input
    early, late = (hold, nullcontext) if of_stream else (nullcontext, hold)
    spooled = spool_standard_input(options.input, options.output, format=options.format)
    with early(), spooled as patterns:
        opened = open_input(replace(options, input=patterns))
        attempt = Attempt(opened, configure(opened), beam_options, started)
        if storage.num_bytes_of(storage.join(attempt.output, MANIFEST_FILE)) is not None:
            finished = _find_finished(attempt)
            if finished is not None:
                if storage.num_bytes_of(lock) is not None:  # of a job killed after its manifest
                    with suppress(OptionsError), late():
                        remove_abandoned(attempt.output, patterns)
                        storage.remove_folder(attempt.run_folder)
                return finished
        with late():
            remove_abandoned(attempt.output, patterns)
            # The lock's last holder may have finished the same dataset, or added to it.
            attempt = replace(attempt, configuration=configure(opened))
            return _find_finished(attempt) or make_dataset(attempt)


def describe(options: AlignOptions) -> tuple[str, str]:
    """What `align` would do, and excessive loss, see `describe_job`."""
    if STANDARD_INPUT in options.input:
        raise InputError(
            "--dry-run reads a sample, and standard input can't be read again: save it"
        )
    with output_here(options.output, options.run.say, uploads=False) as output:
        options, beam_options = _settle(replace(options, output=output))
        opened = open_input(options)
        Attempt(opened, configure(opened), beam_options, 0).find_made()  # refuses as align would
        return describe_job(opened)


def _settle(options: AlignOptions) -> tuple[AlignOptions, PipelineOptions]:
    options = replace(options, input=tuple(map(input_here, options.input)))
    beam_options = make_beam_options(
        options.beam_arguments, run=options.run, own=option_names(AlignOptions)
    )
    files = [place for place in options.input if place != STANDARD_INPUT]
    require_cluster(beam_options, {"--input": files, "--output": [options.output]})
    FileSystems.set_options(beam_options)
    output = storage.absolute(options.output)
    if "::" in output:
        raise OptionsError(f"--output {output}: readers take :: for a chain of URLs; leave it out")
    return replace(options, output=output), beam_options


def _find_finished(attempt: Attempt) -> Manifest | None:
    output, options = attempt.output, attempt.options
    manifest = attempt.find_made()
    if manifest is None:
        return None
    made, remark = "it", ""
    if (newest := read_newest(output).generation) > manifest.generation:
        made = f"its generation 0, and it has grown to generation {newest} since"
    elif storage.num_bytes_of(storage.join(attempt.run_folder, SUMMARY_FILE)) is not None:
        return None
    else:
        remark = require_same_inputs(output, attempt.opened.files, appended=options.append)
    options.run.say(
        f"{output} is finished: the same input and options made {made}; nothing to do"
        + (f"\nnote: {remark}" if remark else "")
    )
    require_few_left_out(manifest, max_share=options.max_dead_letters, output=output)
    return manifest
