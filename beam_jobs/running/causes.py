"""Find the cause in a runner's report of a failure.

A portable runner puts a worker's traceback into its own, in Java or Go.
"""

import re
from itertools import dropwhile, takewhile

_TRACEBACK = "Traceback (most recent call last):"
_JAVAS_FRAME = re.compile(r"\s+at [\w.$/<>]+\(|\s*\.\.\. \d+ (?:more|common frames omitted)")
_RUNNERS = re.compile(r"Pipeline \S+ failed in state \w+: ")
_MODULES = re.compile(r"(?:(?:[a-z_]\w*\.)+[A-Z]\w*: )*(?:[a-z_]\w*\.)+(?=[A-Z]\w*(?::|$))")
_STEP = re.compile(r" \[while running '[^']*'\]")


def cause_of(report: str) -> str:
    r"""Return a report's last error as one line, "" if none.

    Example:
        >>> cause_of("failed: Traceback (most recent call last):\n  File 'a'\na.BadError: no\nb")
        'BadError: no b'
    """
    _, found, after = report.rpartition(_TRACEBACK)
    lines = after.splitlines()
    if found:
        message = dropwhile(lambda line: line[:1] in ("", " "), lines)
        lines = list(takewhile(lambda line: not _JAVAS_FRAME.match(line), message))
    else:
        lines = [line for line in lines if line.strip() and not _JAVAS_FRAME.match(line)][-1:]
    cause = _STEP.sub("", " ".join(" ".join(lines).split()))
    cause = _MODULES.sub("", _RUNNERS.sub("", cause, count=1), count=1)
    if not found and cause.startswith("ConnectException"):
        return (
            f"a task manager could not reach a server that it needs ({cause}): with "
            "--environment_type EXTERNAL that is the worker pool next to it"
        )
    return cause
