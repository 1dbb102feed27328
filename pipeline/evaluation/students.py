"""A student's files, name and model for lm-eval."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from pipeline.command_line.failures import first_line, hinted
from pipeline.evaluation.settings import StudentEngine
from pipeline.models.devices import find_device, lacks_memory
from pipeline.models.fit import short_length
from pipeline.models.output_layer import require_left_to_right
from pipeline.models.teacher_files import TeacherFiles, digest_of_files, find_teacher
from pipeline.models.weights import generate_plainly, load_weights, refuse_nonsense

# A run's subfolder for its student; the run's name is more specific.
_PLAIN_NAMES = {"model", "student", "checkpoint", "checkpoints", "hf"}
# Where our exports keep a tokenizer that transformers would change next to this kind of model.
_OWN_TOKENIZER = "tokenizer"
# The tokenizer's, and what names the tokens that end an answer.
_FURTHER_FILES = (
    *("tokenizer*", "*.model", "special_tokens_map.json", f"{_OWN_TOKENIZER}/*"),
    "generation_config.json",
)


@dataclass(frozen=True)
class Student:
    """A Hugging Face folder or a .gguf file.

    `sha256` covers weights, configuration, tokenizer and generation defaults.
    """

    name: str
    source: str
    path: Path
    sha256: str


def find_student(source: str) -> Student:
    """Find the student of [NAME=]SOURCE; ValueError if it is missing."""
    found, (name, _) = find_files(source), _split_name(source)
    files = [*found.files, *_further_files(found.path)]
    return Student(name, source, found.path, digest_of_files(files))


def find_files(source: str) -> TeacherFiles:
    """Find the files of [NAME=]SOURCE; ValueError if they are missing."""
    return find_teacher(unnamed(source), role="student")


def unnamed(source: str) -> str:
    """Return the SOURCE of [NAME=]SOURCE."""
    return _split_name(source)[1]


def _split_name(source: str) -> tuple[str, str]:
    """Split [NAME=]SOURCE; a path that is there needs no name. ValueError for a name of no use."""
    name, separator, rest = source.partition("=")
    if not separator or Path(expanduser(source)).exists():
        return name_of(source), source
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(
            f"student {source}: \"{name}\" can't be a folder's name: write NAME=SOURCE"
        )
    return name, rest


def name_of(source: str) -> str:
    """Return a source's last part that isn't generic, as `model` is."""
    parts = [part for part in source.partition("@")[0].split("/") if part not in ("", ".")]
    *above, last = parts or ["student"]
    if above and (last in _PLAIN_NAMES or last.startswith("iter_")):
        return name_of("/".join(above)) if above[-1] != ".." else last
    return re.sub(r"[^\w.-]", "_", last.removesuffix(".gguf"))


def open_model(student: Student, engine: StudentEngine) -> LM:
    """Load a student for lm-eval; ValueError if it or its tokenizer fails."""
    arguments: dict[str, object] = {
        "dtype": engine.dtype,
        "batch_size": engine.batch_size,
        "device": with_device(engine).device,
        "trust_remote_code": False,
        # Else a bf16 student's log-probabilities, and their sum, have 8 bits.
        "softmax_dtype": "float32",
    }
    if student.path.suffix == ".gguf":
        arguments |= {"pretrained": str(student.path.parent), "gguf_file": student.path.name}
    else:
        arguments["pretrained"] = str(student.path)
    if (student.path / _OWN_TOKENIZER).is_dir():
        arguments["tokenizer"] = str(student.path / _OWN_TOKENIZER)
    try:
        model = _Loaded(**arguments)
    except (OSError, RuntimeError, ImportError) as error:
        raise ValueError(f"student {student.source}: {str(error).strip()}") from error
    if getattr(model, "prefix_token_id", 0) is None:
        raise ValueError(
            f"student {student.source}: its tokenizer names neither a BOS nor an EOS token, so "
            "there is nothing to begin a text with: name one in its tokenizer_config.json"
        )
    own = model.tok_encode("a", add_special_tokens=False)
    if model.tok_encode("a")[-len(own) :] != own:
        raise ValueError(
            f"student {student.source}: its tokenizer puts tokens behind a text, so every prompt "
            "would end with them: take them out of post_processor in its tokenizer.json, or export "
            "the student again"
        )
    return model


class _Loaded(HFLM):  # type: ignore[misc]
    """lm-eval's model, with weights loaded completely or not at all."""

    def _create_model(
        self, pretrained: str, *, dtype: str, gguf_file: str | None = None, **_: object
    ) -> None:
        model = load_weights(Path(pretrained), dtype=dtype, gguf_file=gguf_file or "")
        model.to(self.device)
        require_left_to_right(model)
        generate_plainly(model)  # answers are greedy, without a penalty
        refuse_nonsense(model, f"student {Path(pretrained, gguf_file or '')}")
        self._model = model

    def _model_call(self, inps: Any, *args: Any, **more: Any) -> Any:
        self._require_alike(inps, inps.shape[1])
        return super()._model_call(inps, *args, **more)

    def _model_generate(self, context: Any, max_length: int, *args: Any, **more: Any) -> Any:
        self._require_alike(context, max_length)
        if len(context) > 1 and self._reads_padding:
            raise hinted(
                ValueError(
                    f"{len(context)} questions at a time: shorter ones are padded in front, and "
                    f"this student ({self.model.config.model_type}) reads the padding, so answers "
                    "would depend on their neighbours"
                ),
                "batch_size=1",
            )
        return super()._model_generate(context, max_length, *args, **more)

    @cached_property
    def _reads_padding(self) -> bool:
        """Whether padding in front of a text changes what follows it, as in RWKV."""
        text = torch.tensor([self.tok_encode("The end is where we start from")], device=self.device)
        padding = text.new_full((1, 8), self.tokenizer.pad_token_id)
        alone, padded = (
            self.model.generate(
                torch.cat([front, text], 1),
                attention_mask=torch.cat([torch.zeros_like(front), torch.ones_like(text)], 1),
                max_new_tokens=1,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=self.tokenizer.pad_token_id,
            ).logits[0]
            for front in (padding[:, :0], padding)
        )
        # 16 bits alone make 1 %.
        return bool((padded - alone).float().std() > 0.05 * alone.float().std())

    def _require_alike(self, rows: Any, length: int) -> None:
        short = short_length(self.model.config)
        if short is not None and len(rows) > 1 and length > short:
            error = ValueError(
                f"{len(rows)} questions at a time have up to {length} tokens with their answers, "
                f"and this student reads all of a batch otherwise if one has more than {short} "
                "(longrope), so results would depend on their neighbours"
            )
            raise hinted(error, "batch_size=1")

    def _create_tokenizer(
        self,
        pretrained: str,
        tokenizer: str | None,
        *,
        gguf_file: str | None = None,
        **more: object,
    ) -> None:
        try:
            super()._create_tokenizer(pretrained, tokenizer, gguf_file=gguf_file, **more)
        except Exception as error:  # tokenizers raises nothing more specific
            place = Path(tokenizer or pretrained, gguf_file or "tokenizer.json")
            why = " ".join(str(error).split()) if place.is_file() else f"no {place.name} is there"
            raise ValueError(
                f"student {place if gguf_file else place.parent}: its tokenizer can't be loaded "
                f"({why}): give a folder with the model's tokenizer.json and tokenizer_config.json"
            ) from error


def with_device(engine: StudentEngine) -> StudentEngine:
    """Return the engine with its device: by default the GPU, if any."""
    return replace(engine, device=str(find_device(engine.device)))


@contextmanager
def naming_too_little_memory(engine: StudentEngine) -> Iterator[None]:
    """Turn torch's error of too little memory into a ValueError, with what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        refusal = ValueError(
            f"the memory of {engine.device} is too small for this student ({first_line(error)}): "
            "ask fewer questions at a time, end other programs there, or choose another device"
        )
        if engine.batch_size > 1:
            hinted(refusal, f"batch_size={engine.batch_size // 2}")
        elif engine.device != "cpu":
            hinted(refusal, "device=cpu")
        raise refusal from error


def _further_files(path: Path) -> list[Path]:
    found = {file for glob in _FURTHER_FILES for file in path.glob(glob)} if path.is_dir() else ()
    return sorted(file for file in found if file.is_file())
