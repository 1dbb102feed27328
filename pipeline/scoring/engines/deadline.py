"""Limit the time of a whole request: httpx2 limits only the wait between any two bytes."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Timer
from typing import Any, Self


class Deadline:
    """Ends a request's connections once its time is over.

        with Deadline(600) as deadline:
            client.get(url, extensions={"trace": deadline.trace})

    Reading from them then ends with a `TransportError`; `is_over` says why.
    """

    def __init__(self, seconds: float) -> None:
        """Begin with the block."""
        self.is_over = False
        self._sockets: list[socket.socket] = []
        self._lock = Lock()
        self._timer = Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep each stream that the client opens."""
        opened = info.get("return_value")
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")) and opened is not None:
            with self._lock:
                self._sockets.append(opened.get_extra_info("socket"))
                if self.is_over:
                    self._shut()

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            self._shut()

    def _shut(self) -> None:
        for one in self._sockets:
            with suppress(OSError):  # closed already
                # The class's own: a TLS socket's would also forget its keys, amid a read.
                socket.socket.shutdown(one, socket.SHUT_RDWR)
