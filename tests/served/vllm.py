"""A real vLLM on CPUs, in a process that tests may kill."""

import os
from collections.abc import Mapping
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
        module = ["-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
        command = [
            SETUP / "bin/python",
            *module,
            f"--model={self._model}",
            f"--port={self._port}",
            *_FLAGS,
        ]
        environment: Mapping[str, str] = {**os.environ, **_ENVIRONMENT}
        self._process = running.enter_context(
            serve(command, self._port, address="127.0.0.1", environment=environment, log=self._log)
        )

    def kill(self) -> None:
        """Kill it and its workers by SIGKILL."""
        kill(self._process)

    @property
    def num_answers(self) -> int:
        """Completions that it has given since it was started."""
        return self._log.read_text().count('POST /v1/completions HTTP/1.1" 200')
