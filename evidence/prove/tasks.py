"""Tasks by doit: what is done stays, what was stopped goes on where it was."""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from doit.cmd_base import ModuleTaskLoader
from doit.dependency import JsonDB
from doit.doit_cmd import DoitMain
from doit.tools import config_changed

Task = dict[str, Any]


class SavedAtOnce(JsonDB):  # type: ignore[misc]  # doit has no types
    """doit writes down what is done when it ends; here at once, so a killed run loses nothing."""

    def set(self, task_id: str, dependency: str, value: object) -> None:
        """Store a value of a task, in memory and in the file."""
        super().set(task_id, dependency, value)
        self.dump()

    def dump(self) -> None:
        """Replace the file as a whole."""
        temporary = Path(f"{self.name}.tmp")
        temporary.write_text(self.codec.encode(self._db), "utf-8")
        temporary.replace(self.name)


def perform(
    tasks: Callable[[], Iterator[Task]], folder: Path, names: Sequence[str] = (), *, jobs: int = 1
) -> int:
    """Run the tasks that are not done; return doit's status, 0 for success.

    Args:
        tasks: yields every task.
        folder: where `done.json` says what is done; one run at a time has it.
        names: tasks, with what they need; none: all.
        jobs: tasks at one time, with a thread each on a CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        settings = {
            "backend": "saved",
            "dep_file": str(folder / "done.json"),
            "check_file_uptodate": "timestamp",
            "verbosity": 2,
            "num_process": jobs if jobs > 1 else 0,
            "par_type": "thread",
            # One run that fails leaves the others alone.
            "continue": True,
            "action_string_formatting": "new",
        }
        plugins = {"BACKEND": {"saved": f"{__name__}:SavedAtOnce"}, "GLOBAL": settings}
        loader = ModuleTaskLoader({"task_prove": tasks})
        wanted = [f"prove:{name}" for name in names]
        return int(DoitMain(loader, extra_config=plugins).run(["run", *wanted]))


def task(
    name: str,
    targets: Sequence[Path],
    action: Any,
    needed: Sequence[Path] = (),
    declared: object = None,
) -> Task:
    """Return a task that is done again if a needed file, or what was declared, has changed."""
    function, *arguments = action if isinstance(action, tuple) else (action,)
    return {
        "name": name,
        "actions": [(function, arguments)],
        "targets": list(map(str, targets)),
        "file_dep": list(map(str, needed)),
        "uptodate": [] if declared is None else [config_changed(repr(declared))],
    }


def once(name: str, targets: Sequence[Path], action: Any, after: Sequence[str] = ()) -> Task:
    """Return a task that is done where its targets are, whoever made them."""
    order = [f"prove:{other}" for other in after]
    return task(name, targets, action) | {"uptodate": [True], "task_dep": order}


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a folder.

    Raises:
        SystemExit: another run holds it, or a command that a killed one has left.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"{folder}: another run, or a command that a killed one has left, is at work here: "
                "wait for it, or end it"
            ) from None
        os.set_inheritable(file.fileno(), True)
        yield
