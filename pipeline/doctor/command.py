"""`vocag doctor`: versions, the machine, and what commands lack."""

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from pipeline.command_line.commands import COMMANDS
from pipeline.command_line.installed import install, installed_version
from pipeline.command_line.option_parsing import parse_options
from pipeline.drawing.printing import prints

_EPILOG = """\
examples:
  vocag doctor
      What works here, and what to install for the rest.
  vocag doctor --json
      The same for a bug report."""


@dataclass(frozen=True)
class DoctorOptions:
    """Show versions, cores, memory, GPUs and caches, and what is missing for which command.

    Attributes:
        json: print JSON, for a bug report.
    """

    json: bool = False


@prints("vocag doctor")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Run the command."""
    options = parse_options(DoctorOptions, argv, prog="vocag doctor", epilog=_EPILOG)
    found = examine()
    yield from [json.dumps(found, indent=2)] if options.json else describe(found)


def examine() -> dict[str, Any]:
    """Return all findings, as `--json` prints them."""
    from pipeline.doctor import machine

    return {
        "vocag": {"version": installed_version(), "folder": str(Path(__file__).parents[2])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "machine": machine.describe_machine(),
        "gpu": machine.describe_gpu(),
        "fast_path": machine.describe_fast_path(),
        **_installed(),
        "caches": machine.describe_caches(),
    }


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield `examine`'s findings for people."""
    from pipeline.drawing.formatting import format_bytes

    own, here, gpu = found["vocag"], found["machine"], found["gpu"]
    yield (
        f"vocag       {own['version']} in {own['folder']}, Python {found['python']['version']}, "
        f"{found['platform']}"
    )
    yield (
        f"machine     {here['cores']} cores, {format_bytes(here['memory_bytes'])} memory, "
        f"{format_bytes(here['disk_free_bytes'])} free in this folder"
    )
    devices = [f"{each['name']} {format_bytes(each['memory_bytes'])}" for each in gpu["devices"]]
    seen = ", ".join(devices) or gpu.get("problem", f"none; torch {gpu.get('torch')} sees no CUDA")
    yield f"GPU         {seen}"
    for each in gpu["devices"]:
        yield from _describe_training(each, gpu.get("missing_kernel"))
    yield f"fast path   {found['fast_path'].get('problem', 'works')}"
    if "problem" in found:
        yield f"packages    {found['problem']}"
        return
    present = [f"{name} {version}" for name, version in found["libraries"].items() if version]
    yield f"libraries   {', '.join(present)}"
    for title, wanted in (("extras", True), ("incomplete", False)):
        names = [name for name, lacking in found["extras"].items() if wanted is not bool(lacking)]
        yield f"{title:<11} {', '.join(names) or 'none'}"
    for name, lacking in {"core": found["core"], **found["commands"]}.items():
        if lacking:
            extra = COMMANDS[name][1] if name in COMMANDS else ""
            yield f"{name:<11} lacks {', '.join(lacking)}"
            yield f"            hint: {install(extra)}"
    ready = [name for name, lacking in found["commands"].items() if not lacking]
    yield f"ready       {', '.join(ready) or 'no command'}"
    for path, num_bytes in found["caches"].items():
        yield f"cache       {path}: {format_bytes(num_bytes)}"


def _describe_training(device: Mapping[str, Any], missing_kernel: str | None) -> Iterator[str]:
    if "problem" in device:
        yield f"training    {device['name']} computes nothing here: {device['problem']}"
        return
    uses = {
        "one kernel for all documents of packed rows": device.get("packed_kernel"),
        "bfloat16": device.get("bfloat16"),
        "fused AdamW": device.get("fused_optimizer"),
    }
    lists = [[name for name, has in uses.items() if has is wanted] for wanted in (True, False)]
    yield f"training    {device['name']} has {', '.join(lists[0]) or 'nothing of what is fastest'}"
    if lists[1]:
        reason = f" ({missing_kernel})" if missing_kernel else ""
        yield f"            lacks {', '.join(lists[1])}{reason}"


def _installed() -> dict[str, Any]:
    try:
        from pipeline.doctor.requirements import extras, library_versions, missing

        lacking = {name: missing(name) for name in extras()}
        core = missing()
    except PackageNotFoundError:
        return {"problem": f"vocag is not installed, so nothing says what it needs: {install('')}"}
    except ModuleNotFoundError as error:
        return {"problem": f"{error.name} is missing: {install('')}"}
    commands = {
        name: [*core, *dict.fromkeys(each for e in extra.split(",") if e for each in lacking[e])]
        for name, (_, extra, _) in COMMANDS.items()
    }
    return {"libraries": library_versions(), "core": core, "extras": lacking, "commands": commands}
