"""What is worth keeping of an experiment, small: its table, plots, commands, and thinned logs.

    python examples/prove/collect.py prove --output docs/evidence

Works on an experiment that is half done, too. Folders in command lines are shortened, so that they
are the same on every machine.
"""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from prove.commands import DONE

ROOT = Path(__file__).parents[2]
FILES = ("table.md", "table.json", "timing.json", "costs.json", "rates.json", "kept.json")
EVERY = 20
"""Steps of a run between two that are kept; where it was measured, a step is kept anyway."""
_KEPT = ("loss", "kept_fraction", "gradient_norm", "learning_rate")


def command_lines(folder: Path) -> Iterator[str]:
    """Yield every finished command in the order of their ends, with folders shortened."""
    corpus = _words(folder / DONE / "text.json")
    shortened = {
        str(folder): "prove",
        f"{ROOT}/": "",
        corpus[corpus.index("--data") + 1]: "benchmarks",
    }
    records = sorted((folder / DONE).rglob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in records:
        line = shlex.join(["python", *_words(path)[1:]])
        # The longest first: one may be the beginning of another.
        for long, short in sorted(shortened.items(), key=lambda pair: -len(pair[0])):
            line = line.replace(long, short)
        yield line


def _words(record: Path) -> list[str]:
    return shlex.split(json.loads(record.read_text("utf-8"))["command"])


def thinned_logs(folder: Path) -> Iterator[str]:
    """Yield some steps of every run as JSON lines.

    Example:
        >>> next(thinned_logs(Path("prove")))  # doctest: +SKIP
        '{"run": "healed", "step": 20, "loss": 5.9, …}'
    """
    for path in sorted(folder.rglob("log.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            step = json.loads(line)
            measured = [name for name in step if name.startswith("heldout_")]
            if measured or step["step"] % EVERY == 0:
                values = {name: step[name] for name in (*_KEPT, *measured) if name in step}
                run = str(path.parent.relative_to(folder))
                yield json.dumps({"run": run, "step": step["step"], **values})


def main() -> None:
    """Write the folder, and say how large it is."""
    parser = argparse.ArgumentParser(description="Collect what is worth keeping.")
    parser.add_argument("folder", type=Path, help="of the experiment")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    folder, output = options.folder.absolute(), options.output
    output.mkdir(parents=True, exist_ok=True)
    for path in (*(folder / name for name in FILES), *sorted(folder.glob("*.svg"))):
        if path.exists():
            shutil.copyfile(path, output / path.name)
    shutil.copyfile(folder / "text" / "bytes.json", output / "bytes.json")
    for name, lines in (
        ("commands.txt", command_lines(folder)),
        ("steps.jsonl", thinned_logs(folder)),
    ):
        (output / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output}: {size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
