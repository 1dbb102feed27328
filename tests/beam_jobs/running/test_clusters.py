"""What can't work on a runner is refused with the reason, before anything is written."""

import http.server
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs.job_errors import OptionsError
from beam_jobs.resuming import require_shared, start_run
from beam_jobs.running.clusters import require_cluster
from beam_jobs.running.runners import make_beam_options
from tests.support.servers import answering, free_port

DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"
IMAGE = ("--environment_config=my-registry/vocag-worker",)
SHARED = {"--output": ["/shared/aligned"]}


def refusal(*arguments: str, **places: list[str]) -> str:
    """Return why options are refused, with places under "--output" unless others are given."""
    with pytest.raises(OptionsError) as caught:
        require_cluster(make_beam_options(arguments), places or SHARED)
    return str(caught.value)


@pytest.fixture
def flink_1_19() -> Iterator[str]:
    """The address of what answers as Flink's REST service does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/overview" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"flink-version": "1.19.3"}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with answering(Handler) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def jar(tmp_path: Path) -> str:
    (tmp_path / "job-server.jar").write_bytes(b"PK")
    return f"--flink_job_server_jar={tmp_path}/job-server.jar"


def test_runners_that_nobody_has_proven_are_refused() -> None:
    spark = "apache_beam.runners.portability.spark_runner.SparkRunner"
    for name in ("SparkRunner", spark, "RayRunner"):
        with pytest.raises(OptionsError, match=f"{name}(: vocag has never been| can't be used)"):
            make_beam_options([f"--runner={name}"])


def test_a_runner_s_short_name_is_its_name() -> None:
    """As Beam finds it; such jobs failed on the cluster, minutes later."""
    assert "Dataflow's workers see no disk" in refusal("--runner=dataflow")
    assert "needs --job_endpoint HOST:PORT" in refusal("--runner=portable")


def test_what_a_runner_needs_must_be_there() -> None:
    assert "needs --job_endpoint HOST:PORT" in refusal("--runner=PortableRunner")
    silent = f"localhost:{free_port()}"
    message = refusal("--runner=PortableRunner", f"--job_endpoint={silent}", *IMAGE)
    assert f"--job_endpoint {silent}: nothing listens there" in message
    assert "write HOST:PORT" in refusal("--runner=FlinkRunner", "--job_endpoint=somewhere", *IMAGE)
    message = refusal(f"--runner={DASK}", f"--dask_client_address=tcp://{silent}")
    assert f"--dask_client_address tcp://{silent}: nothing listens there" in message
    message = refusal("--runner=FlinkRunner", "--flink_job_server_jar=/none/missing.jar")
    assert "missing.jar is not a file" in message


def test_flink_must_answer_in_the_job_server_s_version(jar: str, flink_1_19: str) -> None:
    flink = ("--runner=FlinkRunner", jar, *IMAGE)
    silent = f"localhost:{free_port()}"
    assert "doesn't answer" in refusal(*flink, f"--flink_master={silent}")
    message = refusal(*flink, f"--flink_master={flink_1_19}")
    assert "is Flink 1.19.3, and the job server is for 2.2; add --flink_version 1.19" in message
    fits = [*flink, f"--flink_master={flink_1_19}", "--flink_version=1.19"]
    require_cluster(make_beam_options(fits), SHARED)


def test_workers_must_have_the_package(jar: str, flink_1_19: str) -> None:
    flink = ("--runner=FlinkRunner", jar, f"--flink_master={flink_1_19}", "--flink_version=1.19")
    assert "Beam's own image in Docker, which has no vocag" in refusal(*flink)
    pool = ("--environment_type=EXTERNAL", "--environment_config=localhost:50000")
    require_cluster(make_beam_options([*flink, *pool]), SHARED)
    message = refusal("--runner=DataflowRunner", **{"--output": ["gs://bucket/aligned"]})
    assert "without --sdk_container_image" in message
    staged = make_beam_options(["--runner=DataflowRunner", "--setup_file=pyproject.toml"])
    require_cluster(staged, {"--output": ["gs://bucket/aligned"]})


@pytest.mark.parametrize(
    ("runner", "path", "message"),
    [
        ((f"--runner={DASK}", "--dask_client_address=tcp://s:8786"), "aligned", "is relative to"),
        (("--runner=DataflowRunner",), "/shared/aligned", "see no disk but their own"),
        (("--runner=DataflowRunner",), "file:///shared/aligned", "see no disk but their own"),
    ],
)
@pytest.mark.parametrize("option", ["--input", "--output"])
def test_a_place_that_workers_can_t_find_is_refused(
    runner: tuple[str, ...], path: str, message: str, option: str
) -> None:
    refused = refusal(*runner, **{option: [path]})
    assert message in refused
    assert refused.startswith(f"{option} /shared" if "/" in path else f"{option} aligned")


def test_a_runner_inside_the_launcher_takes_relative_places() -> None:
    for runner in ("DirectRunner", DASK, "PrismRunner"):
        require_cluster(make_beam_options([f"--runner={runner}"]), {"--output": ["aligned"]})


def test_a_worker_that_does_not_see_the_output_says_so(tmp_path: Path) -> None:
    start_run(str(tmp_path), {"name": "corpus"})
    require_shared(str(tmp_path))
    with pytest.raises(OptionsError, match="does not see"):
        require_shared(f"{tmp_path}/elsewhere")
