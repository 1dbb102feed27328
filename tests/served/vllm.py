"""A real vLLM on CPUs, in a process that tests may kill."""

import os
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers import free_port, kill, serve

MODEL = "teacher"
SETUP = Path(__file__).parents[2] / ".served-venv"
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_FLAGS = (
    "--dtype=float32",
    "--max-model-len=1024",
    "--enforce-eager",
    f"--served-model-name={MODEL}",
)


class VllmServer:
    """A server of one model, which keeps its port if it is started again.

    Attributes:
        url: for `--endpoint`.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        """Serve the model in a folder once started; what the server prints goes to a log."""
        self._model, self._log, self._port = folder, log, free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self, running: ExitStack) -> None:
        """Start it, and end it where what is `running` ends."""
        module = [SETUP / "bin/python", "-m", "vllm.entrypoints.openai.api_server"]
        place = ["--host=127.0.0.1", f"--port={self._port}", f"--model={self._model}"]
        server = serve(
            [*module, *place, *_FLAGS],
            self._port,
            address="127.0.0.1",
            environment={**os.environ, **_ENVIRONMENT},
            log=self._log,
            start_seconds=600,  # half a minute, and two where everything is read for the first time
        )
        self._process = running.enter_context(server)

    def kill(self) -> None:
        """Kill it and its workers by SIGKILL."""
        kill(self._process)

    @property
    def num_answers(self) -> int:
        """Completions that it has given since it was started."""
        return self._log.read_text().count('POST /v1/completions HTTP/1.1" 200')
