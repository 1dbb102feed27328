"""Check a cluster's needs before anything starts.

Each would fail anyway: after minutes, in a worker's log, or never.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit
from urllib.request import urlopen

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)

from beam_jobs import storage
from beam_jobs.job_errors import OptionsError

_ANSWER_SECONDS = 8.0
_INSIDE_THE_LAUNCHER = {"[local]", "[auto]"}
_IMAGE = "vocag's image (docs/guides/clusters.md says how to build it)"


_CLUSTERS = {
    name.lower(): name for name in ("DaskRunner", "DataflowRunner", "FlinkRunner", "PortableRunner")
}


def require_tried_runner(name: str | None) -> None:
    """Raise OptionsError for a runner that doesn't run this job."""
    if (name or "").rsplit(".", 1)[-1].lower().startswith("spark"):
        raise OptionsError(
            f"--runner {name}: vocag has never been run on Spark (Beam 2.77's runner takes "
            "only Spark 3, and was not tried), so its bytes were never compared; "
            "use FlinkRunner, DataflowRunner, Dask's or --workers"
        )


def require_cluster(options: PipelineOptions, places: Mapping[str, Sequence[str]]) -> None:
    """Check a cluster for inputs and outputs, `places` by option name.

    OptionsError if a server or the workers' environment is missing, or workers could not find a
    place.
    """
    name = _runner_of(options)
    if name == "PortableRunner":
        _require_job_service(options)
    elif name == "FlinkRunner":
        _require_flink(options)
    if not _is_elsewhere(name, options):
        return
    for option, paths in places.items():
        plain = [path.removeprefix("file://") for path in paths]
        for path in filter(storage.is_local, plain):
            _require_reachable(name, option, path)
    if name == "DaskRunner":
        address = options.get_all_options().get("address")
        if address:
            _require_listener("--dask_client_address", address)
    else:
        _require_package(name, options)


def _runner_of(options: PipelineOptions) -> str:
    """Return the runner's class, found as Beam does: `flink` is FlinkRunner."""
    name = str(options.view_as(StandardOptions).runner or "").rsplit(".", 1)[-1]
    low = name.lower()
    return _CLUSTERS.get(low) or _CLUSTERS.get(f"{low}runner") or name


def _is_elsewhere(name: str, options: PipelineOptions) -> bool:
    if name == "FlinkRunner":
        is_inside = options.view_as(FlinkRunnerOptions).flink_master in _INSIDE_THE_LAUNCHER
        return not is_inside or bool(options.view_as(PortableOptions).job_endpoint)
    if name == "PortableRunner":
        return bool(options.view_as(PortableOptions).job_endpoint != "embed")
    if name == "DaskRunner":
        dask = options.get_all_options()
        return bool(dask.get("address") or dask.get("scheduler_file"))
    return name.startswith("Dataflow")


def _require_reachable(name: str, option: str, path: str) -> None:
    if name == "DataflowRunner":
        raise OptionsError(
            f"{option} {path} lies on this machine, and Dataflow's workers see no disk but their "
            "own; give a place in an object store, such as gs://bucket/folder"
        )
    if not os.path.isabs(path):
        raise OptionsError(
            f"{option} {path} is relative to this command's folder, and {name}'s workers have "
            "others; give the full path of a folder that all of them mount, or an object store"
        )


def _require_package(name: str, options: PipelineOptions) -> None:
    portable = options.view_as(PortableOptions)
    setup = options.view_as(SetupOptions)
    staged = setup.setup_file or setup.requirements_file or setup.extra_packages
    if staged or options.view_as(WorkerOptions).sdk_container_image:
        return
    if name == "DataflowRunner":
        raise OptionsError(
            "--runner DataflowRunner without --sdk_container_image: its workers would start Beam's "
            f"own image, which has no vocag; name {_IMAGE}, or stage the source by --setup_file"
        )
    is_docker = (portable.environment_type or "DOCKER").upper() == "DOCKER"
    if is_docker and not (portable.environment_config or portable.environment_options):
        raise OptionsError(
            f"--runner {name} without --environment_type: its workers would start Beam's own image "
            f"in Docker, which has no vocag; add --environment_config with the name of {_IMAGE}, "
            "or --environment_type EXTERNAL with the address of a worker pool, or PROCESS"
        )


def _require_job_service(options: PipelineOptions) -> None:
    endpoint = options.view_as(PortableOptions).job_endpoint
    if not endpoint:
        raise OptionsError(
            "--runner PortableRunner needs --job_endpoint HOST:PORT, where a job service listens"
        )
    if endpoint != "embed":
        _require_listener("--job_endpoint", endpoint)


def _require_flink(options: PipelineOptions) -> None:
    flink = options.view_as(FlinkRunnerOptions)
    endpoint = options.view_as(PortableOptions).job_endpoint
    if endpoint:
        _require_listener("--job_endpoint", endpoint)
        return
    jar = flink.flink_job_server_jar
    if jar and not urlsplit(jar).scheme and not os.path.isfile(jar):
        raise OptionsError(
            f"--flink_job_server_jar {jar} is not a file (docs/guides/clusters.md names one)"
        )
    if flink.flink_master not in _INSIDE_THE_LAUNCHER:
        _require_version(flink.flink_master, flink.flink_version)


def _require_version(master: str, version: str) -> None:
    url = master if re.match("https?://", master) else f"http://{master}"
    try:
        with urlopen(f"{url.rstrip('/')}/overview", timeout=_ANSWER_SECONDS) as answer:
            running = str(json.load(answer)["flink-version"])
    except (OSError, ValueError, KeyError) as error:
        raise OptionsError(
            f"--flink_master {master} doesn't answer as Flink's REST service does ({error}); give "
            "the host and port of its web page"
        ) from None
    if not running.startswith(f"{version}."):
        raise OptionsError(
            f"--flink_master {master} is Flink {running}, and the job server is for {version}; "
            f"add --flink_version {'.'.join(running.split('.')[:2])}"
        )


def _require_listener(option: str, endpoint: str) -> None:
    host, _, port = re.sub("^[a-z]+://", "", endpoint).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise OptionsError(
            f"{option} {endpoint}: nothing listens there ({error}); start the server first, and "
            "write HOST:PORT"
        ) from None
