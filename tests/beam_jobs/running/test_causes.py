"""Of what a runner reports, one line: what was wrong."""

import pytest

from beam_jobs.running.causes import cause_of

IN_A_WORKER = """Traceback (most recent call last):
  File "/app/beam_jobs/resuming.py", line 111, in require_shared
beam_jobs.job_errors.OptionsError: worker vm does not see /out

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/apache_beam/runners/worker/sdk_worker.py", line 310, in _execute
{error} [while running 'ReadBlocks-ptransform-12']
"""
IN_JAVA = (
    "Pipeline BeamApp-root-1_f2a4 failed in state FAILED: java.lang.RuntimeException: Error "
    "received from SDK harness for instruction 5: "
)
FRAMES = """
\tat org.apache.beam.runners.fnexecution.control.FnApiControlClient$1.onNext(FnApi.java:180)
\tat java.base/java.lang.Thread.run(Thread.java:840)
\t... 7 more
"""
REFUSED = "java.net.ConnectException: java.net.ConnectException: finishConnect(..) failed"


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ("no such shard [while running 'Score/RunInference']", "no such shard"),
        ("a line\nand the reason\n\n", "and the reason"),
        (
            IN_JAVA + IN_A_WORKER.format(error="beam_jobs.job_errors.OptionsError: no /out\nhere"),
            "OptionsError: no /out here",
        ),
        (
            IN_JAVA + IN_A_WORKER.format(error="a.b.OurError: text: no") + FRAMES,
            "OurError: text: no",
        ),
        ("Pipeline a_b failed in state FAILED: java.io.IOException: full" + FRAMES,
         "IOException: full"),
        ("Pipeline a_b failed in state CANCELLED: unknown error", "unknown error"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_cause_is_the_last_error_in_one_line(report: str, cause: str) -> None:
    assert cause_of(report) == cause


def test_workers_that_are_not_there_are_named() -> None:
    cause = cause_of(f"Pipeline a_b failed in state FAILED: {REFUSED}")
    assert cause.startswith("a task manager could not reach a server that it needs (ConnectExc")
    assert "java.net" not in cause
