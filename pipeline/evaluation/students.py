"""The student that a user names: its files, its name, and the model that lm-eval asks."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from lm_eval.api.model import LM
from lm_eval.api.registry import get_model

from pipeline.models.file_digests import digest_of_files
from pipeline.models.teacher_files import find_teacher

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_NEWEST_ITERATION = "latest_checkpointed_iteration.txt"
# Where a run leaves its student; the run's name says more.
_PLAIN_NAMES = {"model", "student", "checkpoint", "checkpoints", "hf"}
# Where our exports keep a tokenizer that transformers would change beside this kind of model.
_OWN_TOKENIZER = "tokenizer"
_TOKENIZER_FILES = ("tokenizer*", "*.model", "special_tokens_map.json", f"{_OWN_TOKENIZER}/*")


@dataclass(frozen=True)
class Student:
    """A model on this machine's disk.

    Attributes:
        name: in reports, and of its folder among the results.
        source: what the user named.
        path: a folder in the layout of Hugging Face, or a .gguf file.
        sha256: 64 hex digits over weights, configuration and tokenizer.
    """

    name: str
    source: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class Engine:
    """How a student runs.

    Attributes:
        dtype: of the weights; "auto" as they are stored.
        device: such as "cpu"; "" for the GPU where there is one.
        batch_size: questions at a time.
        tokenizer: a folder or repository, where it isn't beside the weights.
    """

    dtype: Dtype = "auto"
    device: str = ""
    batch_size: int = 1
    tokenizer: str = ""


def find_student(source: str, output: Path) -> Student:
    """Return the student that a user names; a repository is downloaded, a checkpoint exported.

    Args:
        source: [NAME=] a Hugging Face folder or repository, a .gguf file, or a checkpoint of
            Megatron's (`--save`, or one iteration's folder).
        output: of the results, where an exported checkpoint goes.

    Raises:
        ValueError: no such student, or the export failed.

    Example:
        >>> find_student("mine=runs/teacher/model", Path("out")).name  # doctest: +SKIP
        'mine'
    """
    name, separator, rest = source.partition("=")
    place = rest if separator else source
    name = name if separator else name_of(source)
    path = Path(place).expanduser()
    if (path / _NEWEST_ITERATION).is_file() or (path / ".metadata").is_file():
        place = str(_export(path, output / name))
    found = find_teacher(place, role="student")
    files = [*found.files, *_tokenizer_files(found.path)]
    return Student(name, source, found.path, digest_of_files(files))


def name_of(source: str) -> str:
    """Return what a student is called where the user does not say.

    Example:
        >>> name_of("runs/teacher/model"), name_of("HuggingFaceTB/SmolLM2-135M@main")
        ('teacher', 'SmolLM2-135M')
    """
    *above, last = [part for part in source.partition("@")[0].split("/") if part not in ("", ".")]
    if above and (last in _PLAIN_NAMES or last.startswith("iter_")):
        return name_of("/".join(above)) if above[-1] != ".." else last
    return re.sub(r"[^\w.-]", "_", last.removesuffix(".gguf"))


def open_model(student: Student, engine: Engine) -> LM:
    """Load a student as a model of lm-eval's.

    Raises:
        ValueError: no tokenizer there, or weights that can't be loaded.

    Example:
        >>> student = find_student("runs/teacher/model", Path("out"))  # doctest: +SKIP
        >>> open_model(student, Engine()).max_length  # doctest: +SKIP
        2048
    """
    tokenizer = engine.tokenizer
    arguments: dict[str, object] = {
        "dtype": engine.dtype,
        "batch_size": engine.batch_size,
        "device": choose_device(engine.device),
    }
    if student.path.suffix == ".gguf":
        arguments |= {"pretrained": str(student.path.parent), "gguf_file": student.path.name}
    else:
        arguments["pretrained"] = str(student.path)
    if (student.path / _OWN_TOKENIZER).is_dir():
        tokenizer = tokenizer or str(student.path / _OWN_TOKENIZER)
    if tokenizer:
        arguments["tokenizer"] = tokenizer
    try:
        model: LM = get_model("hf")(**arguments)
    except (OSError, RuntimeError, ImportError) as error:
        raise ValueError(f"student {student.source}: {str(error).strip()}") from error
    if getattr(model, "prefix_token_id", 0) is None:
        raise ValueError(
            f"student {student.source}: its tokenizer names neither a BOS nor an EOS token, so "
            "there is nothing to begin a text with: name one in its tokenizer_config.json, or "
            "another tokenizer with --tokenizer"
        )
    return model


def answers_name(student: Student, engine: Engine) -> str:
    """Return the file name of a student's answers: other weights or rounding, other answers."""
    kind = choose_device(engine.device).partition(":")[0]
    identity = json.dumps([student.sha256, engine.dtype, kind, engine.tokenizer])
    return f"answers-{sha256(identity.encode()).hexdigest()[:12]}.jsonl"


def choose_device(device: str) -> str:
    """Return the device to run on; "" chooses the GPU where there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _tokenizer_files(path: Path) -> list[Path]:
    found = {file for glob in _TOKENIZER_FILES for file in path.glob(glob)} if path.is_dir() else ()
    return sorted(file for file in found if file.is_file())


def _export(checkpoint: Path, folder: Path) -> Path:
    """Export a Megatron checkpoint with the plugin's own command, once.

    A command of its own, because Megatron's packages can't be asked for here.
    """
    iteration = _newest(checkpoint)
    digest = digest_of_files(sorted(file for file in iteration.rglob("*") if file.is_file()))
    output = folder / f"exported-{digest[:12]}"
    if (output / "config.json").is_file():
        return output
    command = ["-m", "megatron_plugin.export_hf", str(checkpoint), str(output)]
    logger.info("exporting %s to %s", checkpoint, output)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise ValueError(
            f"student {checkpoint} is a Megatron checkpoint, and its export failed: {said[-1]}; "
            f"run `vocag export {checkpoint} FOLDER` (extra: megatron), then evaluate FOLDER"
        )
    return output


def _newest(checkpoint: Path) -> Path:
    tracker = checkpoint / _NEWEST_ITERATION
    if not tracker.is_file():
        return checkpoint
    text = tracker.read_text().strip()
    return checkpoint / (f"iter_{int(text):07d}" if text.isdigit() else text)
