"""Choose a Beam runner, run the job, and report its end."""

import logging
import os
import re
import shutil
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from difflib import get_close_matches
from functools import partial
from io import StringIO

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    FlinkRunnerOptions,
    GoogleCloudOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    SetupOptions,
    SparkRunnerOptions,
    StandardOptions,
    TestDataflowOptions,
    TestOptions,
    WorkerOptions,
)
from apache_beam.portability.api import beam_provision_api_pb2
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.runners.portability.portable_runner import JobServiceHandle
from apache_beam.runners.runner import PipelineRunner, create_runner

from beam_jobs import storage
from beam_jobs.job_errors import JobError, OptionsError
from beam_jobs.running.causes import cause_of
from beam_jobs.running.clusters import require_tried_runner
from beam_jobs.running.exits import RESUME
from beam_jobs.running.job_progress import JobStage, reset_progress, run_with_bar
from beam_jobs.running.run_options import HERE, RunOptions
from beam_jobs.running.workers import WorkerDiedError, Workers, run_supervised
from beam_jobs.shortages import explain_shortage
from pipeline.command_line.failures import HINT, hinted

_OF_CLUSTERS = (
    *(WorkerOptions, PortableOptions, FlinkRunnerOptions, SparkRunnerOptions, PrismRunnerOptions),
    *(JobServerOptions, SetupOptions, GoogleCloudOptions, TestOptions, TestDataflowOptions),
)
_OF_ANY_RUNNER = {
    *("--project", "--no_auth", "--impersonate_service_account", "--user_agent", "--beam_plugins"),
    *("--default_sdk_harness_log_level", "--sdk_harness_log_level_overrides", "--pickle_library"),
    *("--max_cache_memory_usage_mb", "--element_processing_timeout_minutes", "--job_name"),
    *("--save_main_session", "--no_save_main_session", "--no_gcsio_throttling_counter"),
}
"""Options of clusters that work anywhere, as do names with gcs, gcp or bucket."""

_AGAIN = "run the same command again"
_HINT_LINE = re.compile(rf"^{HINT}(.+)", re.MULTILINE)
"""In a traceback, also in a worker's that a runner hands on as text."""

logger = logging.getLogger(__name__)

_DIRECT_RUNNERS = {"", "direct", "directrunner", "fnapirunner"}


def make_beam_options(
    arguments: Sequence[str],
    *,
    run: RunOptions = HERE,
    command: str = "align",
    own: Sequence[str] = (),
) -> PipelineOptions:
    """Return Beam's options from arguments that aren't the command's own.

    OptionsError for unknown or unreadable arguments, and for a runner that is unknown, doesn't run
    these jobs, or doesn't take --workers.
    """
    workers = [f"--direct_num_workers={run.workers}"] if run.workers > 1 else []
    with _one_refusal(command):
        options = PipelineOptions([*arguments, *workers])
        require_tried_runner(options.view_as(StandardOptions).runner)
        runner = make_runner(options)  # importing a runner's module makes its options known
        idle = _of_clusters() if isinstance(runner, fn_runner.FnApiRunner) else set()
        _require_known(arguments, command, own, idle)
    _refuse_likenesses(arguments, command, own)
    _say_idle(arguments, idle, has_workers="--workers" in own)
    if run.workers > 1:
        _require_ours_to_start(options, arguments, run.workers)
    options.view_as(SetupOptions).save_main_session = False
    direct = options.view_as(DirectOptions)
    if direct.direct_running_mode == "multi_processing":
        direct.direct_running_mode = "in_memory"  # else Beam's own command starts the processes
    return options


def make_runner(options: PipelineOptions) -> PipelineRunner:
    """Return the runner that the options name, by default `FnApiRunner`.

    Since Beam 2.65, its `DirectRunner` first tries Prism, which ignores --direct_num_workers.
    OptionsError for an unknown runner.
    """
    name = options.view_as(StandardOptions).runner or ""
    if name.lower() in _DIRECT_RUNNERS:
        return _direct_runner(options)
    try:
        return create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise OptionsError(f"--runner {name} can't be used: {error}") from error


def run_pipeline(
    build: Callable[[beam.Pipeline], None],
    options: PipelineOptions,
    run_folder: str,
    *,
    run: RunOptions,
    stage: Callable[[Counter[str]], JobStage],
    disk_bytes: int | None = None,
) -> None:
    """Run a pipeline, with a live bar if its folder is local; a JobError names the cause."""
    reset_progress(run_folder)
    pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    build(pipeline)

    def work() -> None:
        pipeline.run().wait_until_finish()

    supervised = work
    if isinstance(pipeline.runner, fn_runner.FnApiRunner):
        workers = Workers(verbose=run.verbose)
        pipeline.runner = _direct_runner(pipeline.options, workers)
        supervised = partial(run_supervised, work, workers)
    try:
        if storage.is_local(run_folder):
            run_with_bar(run_folder, supervised, stage=stage, quiet=run.quiet)
        else:
            supervised()
    except Exception as error:  # whatever a runner or a worker raises
        raise _job_error(error, run_folder, disk_bytes) from error
    finally:
        shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)  # an abandoned thread doesn't


def describe_runner(options: PipelineOptions) -> str:
    """The runner's name, with the direct runner's processes or threads."""
    name = options.view_as(StandardOptions).runner or ""
    if name.lower() not in _DIRECT_RUNNERS:
        return str(name.rsplit(".", 1)[-1])
    direct = options.view_as(DirectOptions)
    if direct.direct_num_workers == 1:
        return "DirectRunner"
    kind = "threads" if direct.direct_running_mode == "multi_threading" else "processes"
    return f"DirectRunner, {direct.direct_num_workers} {kind}"


def _direct_runner(
    options: PipelineOptions, workers: Workers | None = None
) -> fn_runner.FnApiRunner:
    encoded = JobServiceHandle.encode_pipeline_options(options.get_all_options())
    info = beam_provision_api_pb2.ProvisionInfo(pipeline_options=encoded)
    in_launcher = options.view_as(DirectOptions).direct_num_workers == 1
    return fn_runner.FnApiRunner(
        default_environment=workers.environment if workers and not in_launcher else None,
        provision_info=fn_runner.ExtendedProvisionInfo(info),
    )


def _job_error(error: Exception, run_folder: str, disk_bytes: int | None) -> JobError:
    has_died = isinstance(error, WorkerDiedError)
    details = error.log if isinstance(error, WorkerDiedError) else traceback.format_exc()
    cause = str(error) if has_died else f"the job failed: {cause_of(str(error)) or repr(error)}"
    shortage = explain_shortage(details, os.path.dirname(run_folder), disk_bytes)
    if shortage is not None:
        cause = f"{cause}: {shortage}" if has_died else shortage
    hints = [] if has_died or shortage else _HINT_LINE.findall(details)
    told = "" if hints or _AGAIN in cause else f"; {RESUME}"
    path = storage.join(run_folder, "error.txt")
    try:
        storage.write_atomically(path, f"{cause}\n\n{details}".encode(), scratch=run_folder)
        told = f" ({'its log' if has_died else 'traceback'} in {path}){told}"
    except OSError:  # the disk is full
        pass
    failure = JobError(f"{cause}{told}")
    return hinted(failure, hints[-1]) if hints else failure


def _require_ours_to_start(
    options: PipelineOptions, arguments: Sequence[str], workers: int
) -> None:
    if not isinstance(make_runner(options), fn_runner.FnApiRunner):
        name = options.view_as(StandardOptions).runner
        raise OptionsError(
            f"--workers {workers} starts processes on this machine, and --runner {name} has its "
            "own; leave one of the two out"
        )
    both = [name for name in arguments if name.startswith(("--direct_num", "--direct_running"))]
    if both:
        raise OptionsError(f"--workers {workers} means the same as {both[0]}; leave one out")


@contextmanager
def _one_refusal(command: str) -> Iterator[None]:
    """Raise the error of Beam's parser without the options it prints."""
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as end:
        message = printed.getvalue().strip().rpartition("error: ")[2]
        raise hinted(OptionsError(f"Beam: {message}"), f"vocag {command} --help") from end


def _of_clusters() -> set[str]:
    """Beam's options without effect on this machine."""
    parser = ArgumentParser(add_help=False)
    for options in _OF_CLUSTERS:
        options._add_argparse_args(parser)  # type: ignore[no-untyped-call]
    names = parser._option_string_actions.keys() - _OF_ANY_RUNNER
    return {name for name in names if not re.search("gcs|gcp|bucket", name)}


def _say_idle(arguments: Sequence[str], idle: set[str], *, has_workers: bool) -> None:
    given = dict.fromkeys(each.partition("=")[0] for each in arguments)
    without = [name for name in given if name in idle]
    if without:
        logger.warning(
            "%s: no effect on this machine, only with the --runner of a cluster%s",
            ", ".join(without),
            "; for processes here, --workers N" if has_workers else "",
        )


def _refuse_likenesses(arguments: Sequence[str], command: str, own: Sequence[str]) -> None:
    """Raise OptionsError for one of Beam's options that is spelt as one of ours: --dry_run."""
    for name in (each.partition("=")[0] for each in arguments):
        ours = name.replace("_", "-")
        if ours != name and ours in own:
            raise hinted(OptionsError(f"{name} isn't an option of vocag {command}"), ours)


def _require_known(
    arguments: Sequence[str], command: str, own: Sequence[str], idle: set[str]
) -> None:
    """Raise OptionsError for an unknown option; never recommend an `idle` one."""
    parsers: list[ArgumentParser] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    unknown: list[str] = parsers[0].parse_known_args(list(arguments))[1]
    if not unknown:
        return
    names = [*own, *(parsers[0]._option_string_actions.keys() - idle)]
    see = f"vocag {command} --help"
    close = get_close_matches(unknown[0].partition("=")[0], names, 1)
    is_file = not unknown[0].startswith("-")
    error = OptionsError(
        f"neither {command} nor Beam knows {' '.join(unknown)}{'; quote globs' if is_file else ''}"
    )
    raise hinted(error, f"{close[0]}  # or see {see}" if close else see)
