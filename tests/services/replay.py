"""Run a pipeline as it was staged for Dataflow: python replay.py PIPELINE_PB PACKAGE_FOLDER.

The transforms, and the classes pickled in them, come from the staged files alone: PACKAGE_FOLDER is
where the staged source distribution was installed.
"""

import sys
from pathlib import Path

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import beam_jobs


def main(pipeline_file: str, package_folder: str) -> None:
    assert Path(beam_jobs.__file__).is_relative_to(package_folder), beam_jobs.__file__
    pipeline = beam_runner_api_pb2.Pipeline.FromString(Path(pipeline_file).read_bytes())
    for environment in pipeline.components.environments.values():
        environment.urn = python_urns.EMBEDDED_PYTHON  # in place of the worker's container
        environment.payload = b""
        del environment.dependencies[:]
    result = FnApiRunner().run_via_runner_api(pipeline, PipelineOptions(["--no_auth"]))
    print(result.wait_until_finish())


if __name__ == "__main__":
    main(*sys.argv[1:])
