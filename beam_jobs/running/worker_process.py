"""What a worker process of this machine runs: Beam's worker, for as long as its launcher lives."""

import os
import threading

from apache_beam.runners.worker import sdk_worker_main

from beam_jobs.running.exits import skip_last_collection

_LOOK_SECONDS = 1.0


def main(launcher: int) -> None:
    """Serve the runner that the environment names, until it says that all is done."""
    skip_last_collection()
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    del os.environ["LOGGING_API_SERVICE_DESCRIPTOR"]  # what it logs is for its own file
    sdk_worker_main.main([])


def _end_with(launcher: int) -> None:
    """End this process once the launcher is gone, however it went."""
    while os.getppid() == launcher:
        threading.Event().wait(_LOOK_SECONDS)
    os._exit(1)
