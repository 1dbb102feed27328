"""Standard streams that are closed or gone when a command starts."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_a_closed_stream_s_number(closed: str, tmp_path: Path) -> None:
    """What C libraries print on stderr went to whatever file a command had opened first."""
    opened = tmp_path / "file"
    program = (
        "import os, sys; from pipeline.command_line.streams import outlive_readers\n"
        f"outlive_readers(); file = open({str(opened)!r}, 'w'); number = file.fileno()\n"
        "os.write(1, b'1'); os.write(2, b'2'); print('out'); print('err', file=sys.stderr)\n"
        "assert sys.stdin.read() == ''\n"
        "sys.exit(number)"
    )
    command = f'"$@" {closed}'
    words = [sys.executable, "-c", program]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *words], check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode > 2
    assert opened.read_text() == ""
