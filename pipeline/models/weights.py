"""Load models of transformers completely, without code from their folders.

transformers fills missing weights with random numbers and drops unknown ones; here both are errors.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from pipeline.command_line.failures import first_line, hinted
from pipeline.models.broken_files import require_configuration, require_plain, require_whole
from pipeline.models.devices import lacks_memory
from pipeline.models.gguf_files import GgufFile, read_gguf_config, require_tensors_read

_NUM_NAMED = 3
_ADAPTER_FILE = "adapter_config.json"
_GENERATION_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Parts of published vision models besides the text model loaded here.
_OTHER_SENSES = re.compile(r"(model\.)?(vision_model|vision_tower|multi_modal_projector)\.")

Shapes = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, its shape in the file and in the model."""


class UnfittingWeightsError(ValueError):
    """A model's files lack weights of its configuration, or hold others."""


class ForeignCodeError(ValueError):
    """A model's own code, or transformers', failed or isn't run."""


def load_weights(
    folder: Path, *, dtype: torch.dtype | str, gguf_file: str = "", **more: Any
) -> PreTrainedModel:
    """Load a folder's causal model on the CPU, in evaluation mode.

    A `dtype` of "auto" is the stored one. BrokenFileError for a missing, cut or malformed file;
    UnfittingWeightsError for missing, unexpected or misshapen weights; UnreadGgufError for unknown
    properties; ForeignCodeError if transformers fails, or needs the folder's code.
    """
    where = str(folder / gguf_file)
    if (folder / _ADAPTER_FILE).is_file():
        raise UnfittingWeightsError(
            f"{where} holds {_ADAPTER_FILE}: an adapter's other weights would come from elsewhere; "
            "merge it into its model (peft's merge_and_unload), and save_pretrained that"
        )
    file = GgufFile(folder / gguf_file) if gguf_file else None
    with foreign_code(where):
        if file is None:
            require_plain(folder)
        else:
            more |= {"gguf_file": gguf_file, "config": read_gguf_config(file)}
        try:
            model, found = cast(Any, AutoModelForCausalLM).from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                # Else transformers reports only the first mismatch.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **more,
            )
        except Exception:
            if file is None:
                require_whole(folder)
            raise
    require_fit(
        where,
        missing=found["missing_keys"],
        unexpected=_unexpected(model, found["unexpected_keys"]),
        mismatched=found["mismatched_keys"],
    )
    if file is not None:
        require_tensors_read(file, model)
    return cast(PreTrainedModel, model)


def read_config(folder: str | Path) -> Any:
    """Read a folder's configuration; errors are those of `load_weights`."""
    with foreign_code(str(folder)):
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception:
            require_configuration(Path(folder))
            raise


def make_model(config: Any, **more: Any) -> PreTrainedModel:
    """Make a model of a configuration, with random weights."""
    with foreign_code(str(getattr(config, "name_or_path", "")) or str(config.model_type)):
        model = cast(Any, AutoModelForCausalLM).from_config(config, trust_remote_code=False, **more)
    return cast(PreTrainedModel, model)


def generate_plainly(model: PreTrainedModel) -> None:
    """Drop a model's generation defaults, such as a temperature or a penalty, but for its tokens.

    `generate` takes them for whatever its caller doesn't say, and `save_pretrained` refuses some
    that were loaded.
    """
    own = cast(Any, model).generation_config
    tokens = {name: getattr(own, name, None) for name in _GENERATION_TOKENS}
    model.generation_config = GenerationConfig(**tokens)


def require_finite_weights(model: PreTrainedModel) -> None:
    """Raise UnfittingWeightsError if a weight holds NaN or infinity."""
    for name, weight in model.named_parameters():
        is_plain = weight.is_floating_point() and weight.element_size() > 1
        if is_plain and not weight.isfinite().all():
            raise UnfittingWeightsError(
                f"{model.config.name_or_path or type(model).__name__}: its weight {name} holds NaN "
                f"or infinity in {weight.dtype}: it was damaged, diverged in training, or needs a "
                "wider type: download its files again, or name an earlier checkpoint"
            )


def require_reloadable(model: PreTrainedModel) -> None:
    """Raise ValueError if `AutoModelForCausalLM` couldn't load what a model saves."""
    config = model.config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{config.name_or_path or type(model).__name__}: {type(model).__name__} is saved with "
            f'the model_type "{config.model_type}", which AutoModelForCausalLM of transformers '
            f"{transformers.__version__} doesn't load, so the model made from it would be of no "
            "use: choose another architecture"
        )


def require_row(where: str, token: int, num_rows: int) -> None:
    """Raise ValueError if a model has no row for a token."""
    if token >= num_rows:
        raise ValueError(
            f"{where}: token {token} exceeds the model's {num_rows} rows: give it the tokenizer "
            "that it was trained with"
        )


def refuse_nonsense(model: PreTrainedModel, where: str) -> None:
    """Let a model refuse tokens without a row, and logits that aren't numbers, by ValueErrors."""

    def require_rows(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        require_row(where, int(given[0].max()), len(layer.weight))

    def require_number(_: Any, __: Any, output: Any) -> None:
        if not output.logits[:, -1].amax().isfinite():  # what precedes it would spread to it
            raise ValueError(
                f"{where}: its logits aren't numbers: it diverged in training, or overflows in "
                f"{model.dtype}: name an earlier checkpoint, or store it in a wider type"
            )

    cast(Any, model).get_input_embeddings().register_forward_pre_hook(require_rows)
    model.register_forward_hook(require_number)


def require_fit(
    where: str,
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[Shapes] = (),
) -> None:
    """Raise UnfittingWeightsError unless a model's files hold exactly its weights."""
    shapes = [f"{name} {[*held]} instead of {[*asked]}" for name, held, asked in mismatched]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    found = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds if names]
    if found:
        raise UnfittingWeightsError(
            f"{where}: its weights don't fit its configuration: {'; '.join(found)}: download all "
            "of its files again, with the config.json that belongs to them"
        )


@contextmanager
def foreign_code(where: str) -> Iterator[None]:
    """Turn any error of foreign code into one sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ForeignCodeError(
            f"{where} brings code of its own (auto_map), which is never run: name a model that "
            "transformers has code for, or serve this one as a teacher (vocag score --engine "
            "openai)"
        ) from error
    except Exception as error:
        if lacks_memory(error) or isinstance(error, ModuleNotFoundError):
            raise  # the machine's, and known to commands
        if isinstance(error, ImportError):  # says what to install
            raise ForeignCodeError(f"{where}: {' '.join(str(error).split())}") from error
        if "no kernel image" in str(error):
            refusal = ForeignCodeError(
                f"{where}: torch {torch.__version__} was built without kernels for this GPU "
                f"({first_line(error)}): install a build that has them, see "
                "https://pytorch.org/get-started, or take another device"
            )
            raise hinted(refusal, "device=cpu") from error
        raise ForeignCodeError(
            f"{where}: its code in transformers {transformers.__version__} ends with "
            f"{type(error).__name__}: {error}: try another release of transformers, or another "
            "model"
        ) from error


def _unexpected(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Tensors that a part of the model should read; old files may hold computed buffers."""
    computed = [f".{name}" for name, _ in model.named_buffers()]
    own = {name for name, _ in model.named_modules()}

    def is_known(name: str) -> bool:
        part = _OTHER_SENSES.match(name)
        of_others = part is not None and part[0][:-1] not in own
        return of_others or any(buffer.endswith(f".{name}") for buffer in computed)

    return [name for name in names if not is_known(name)]


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:_NUM_NAMED]
    return ", ".join([*first, *(["…"] if len(names) > len(first) else [])])
