"""Commands that are killed in the middle, at a call of one of their functions."""

_KILLED_AT = """
import os, signal, sys
from importlib import import_module
module = import_module("beam_jobs.{module}")
original, calls = module.{function}, []
def die(*arguments, **keywords):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **keywords)
module.{function} = die
from {command} import main
sys.exit(main(sys.argv[1:]))
"""


def killed_at(command: str, module: str, function: str, *, call: int) -> str:
    """Return the code of a process that runs a command and is killed at a call of a function.

    Args:
        command: the module whose `main` gets the process's arguments.
        module: the function's, below `beam_jobs`.
        function: its name there.
        call: the call that kills, from 1.
    """
    return _KILLED_AT.format(command=command, module=module, function=function, call=call)
