"""What a worker process of this machine runs: Beam's worker, for as long as its launcher lives."""

import os
import threading

from apache_beam.runners.worker import sdk_worker_main

from beam_jobs.running.supervision import skip_last_collection


def main() -> None:
    """Serve the runner that the environment names, until it says that all is done."""
    skip_last_collection()
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    sdk_worker_main.main([])


def _end_with_launcher() -> None:
    """End this process when the other end of its standard input is gone."""
    while os.read(0, 1 << 10):  # not through sys.stdin, whose lock could stop the interpreter's end
        pass
    os._exit(1)
