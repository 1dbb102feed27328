"""Commands' logs: lines on stderr without control characters."""

import logging

from pipeline.command_line.failures import printable


def set_up_logging(name: str, level: int = logging.ERROR) -> None:
    """Prefix messages with a command's name."""
    logging.basicConfig()
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(_Printable(f"{name}: %(message)s"))
    logging.getLogger().setLevel(level)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))
