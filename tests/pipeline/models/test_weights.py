"""A model is loaded whole, without code from its folder, or it is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from beam_jobs.score.command import main as score
from pipeline.command_line.failures import hints_of
from pipeline.models.hf_models import load_language_model
from pipeline.models.weights import ForeignCodeError, UnfittingWeightsError, foreign_code
from pipeline.tokenization.sources import find_tokenizer
from pipeline.training.command import main as train
from pipeline.transfer.acceptance_command import main as acceptance
from pipeline.transfer.command import main as transfer
from tests.support.datasets import byte_level, make_texts
from tests.support.hf_folders import write_model
from tests.support.scored_data import score_arguments

Weights = dict[str, Tensor]
LAYER = "model.layers.1."
DOWN = f"{LAYER}mlp.down_proj.weight"


def change(folder: Path, made: Callable[[Weights], object] | None = None, **config: Any) -> Path:
    """Change a model's weights or its configuration."""
    file, settings = folder / "model.safetensors", folder / "config.json"
    if made is not None:
        weights = load_file(file)
        made(weights)
        save_file({n: w.contiguous() for n, w in weights.items()}, file, {"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    return folder


def without(part: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in [*weights] if part in name]


def renamed(weights: Weights) -> None:
    for name in [name for name in weights if f"{LAYER}self_attn" in name]:
        weights[name.replace("self_attn", "attention")] = weights.pop(name)


BROKEN: dict[str, tuple[Callable[[Weights], object] | None, dict[str, Any], str]] = {
    "a matrix is missing": (without(DOWN), {}, rf"1 missing \({DOWN}\): download"),
    "a shard is missing": (without(LAYER), {}, rf"9 missing \({LAYER}input_layernorm.weight, "),
    "a bias": (
        lambda weights: weights.update({f"{LAYER}self_attn.q_proj.bias": torch.ones(32)}),
        {},
        rf"1 unexpected \({LAYER}self_attn.q_proj.bias\)",
    ),
    "a renamed layer": (renamed, {}, r"4 missing \(.*, …\); 4 unexpected \(.*attention.k_proj"),
    "fewer layers": (None, {"num_hidden_layers": 1}, rf"9 unexpected \({LAYER}input_layernorm"),
    "more layers": (None, {"num_hidden_layers": 3}, r"9 missing \(model.layers.2."),
    "other shapes": (
        None,
        {"intermediate_size": 96},
        r"6 of another shape \(model.layers.0.mlp.down_proj.weight \[32, 64\] instead of \[32, 9",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    made, config, message = BROKEN[case]
    change(write_model(tmp_path, byte_level(400)), made, **config)
    with pytest.raises(UnfittingWeightsError, match=f"^{tmp_path}: its weights .*: {message}"):
        load_language_model(str(tmp_path))


def test_what_is_tied_computed_or_for_pictures_may_differ(tmp_path: Path) -> None:
    def add(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{LAYER}self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        weights["vision_model.layernorm.weight"] = torch.ones(4)

    folder = change(write_model(tmp_path, byte_level(400)), add)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    load_language_model(str(folder))


def damaged(part: str) -> Callable[[Weights], object]:
    return lambda weights: weights[part].view(-1)[5].fill_(torch.nan)


@pytest.mark.parametrize(("part", "packed"), [(DOWN, False), ("model.embed_tokens.weight", True)])
def test_a_weight_that_is_not_a_number_is_named(part: str, packed: bool, tmp_path: Path) -> None:
    """A warning let the model through, to losses that are NaN."""
    model = change(write_model(tmp_path, byte_level(400)), damaged(part))
    named = f"^{tmp_path}: its weight {part} holds NaN or infinity in torch.float32: it was damaged"
    with pytest.raises(UnfittingWeightsError, match=named):
        load_language_model(str(model), packed=packed)


def test_a_weight_that_only_some_documents_meet_is_named_too(tmp_path: Path) -> None:
    """As an expert, or the row of a token; packed rows were refused as leaking."""

    def damage(weights: Weights) -> None:
        rows = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = rows.clone()
        rows[_only_in_packed_rows()] = torch.inf

    model = change(write_model(tmp_path, byte_level(400)), damage, tie_word_embeddings=False)
    with pytest.raises(UnfittingWeightsError, match=r"model.embed_tokens.weight holds NaN or inf"):
        load_language_model(str(model))
    load_language_model(str(model), packed=False)


def _only_in_packed_rows() -> int:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(400, (17,), generator=generator)
    drawn = torch.Generator().manual_seed(0)
    more = torch.cat([torch.randint(400, (n,), generator=drawn) for n in (5, 14, 3, 12, 2, 1, 7)])
    return int(next(token for token in more if token not in first))


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    """Its model would come from wherever it says."""
    write_model(tmp_path, byte_level(400))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnfittingWeightsError, match=r"holds adapter_config.json: .* merge it"):
        load_language_model(str(tmp_path))


def commands(world: Path, model: Path, output: Path) -> dict[str, Callable[[], int]]:
    """Return every command that loads a model, with a given one."""
    texts = output / "texts.txt"
    texts.write_text("\n".join(text for _, text in make_texts(4)), "utf-8")
    run = ["--data", str(world / "data"), "--method", "full", "--seq-length", "64"]
    run += ["--num-steps", "1", "--warmup-steps", "0", "--global-batch-size", "1"]
    run += ["--micro-batch-size", "1", "--device", "cpu", "--output", str(output / "run")]
    guided = [
        *run[:2],
        "--method",
        "teacher",
        "--teacher",
        str(model),
        *run[4:],
        "--student",
        str(world / "student"),
    ]
    given = ["--text", str(texts)]
    new = [*given, "--tokenizer", "bytes", "--output", str(output / "new")]
    two = [str(world / "student"), str(model), *given, "--prompts", "1", "--tokens", "2"]
    scored = [str(world / "data"), *score_arguments(world)[3:], "--teacher", str(model)]
    return {
        "train": lambda: train([*run, "--student", str(model)]),
        "running teacher": lambda: train(guided),
        "score": lambda: score([*scored, "--dtype", "bfloat16"]),
        "transfer": lambda: transfer([str(model), *new]),
        "acceptance": lambda: acceptance(two),
    }


@pytest.mark.parametrize("command", ["train", "running teacher", "score", "transfer", "acceptance"])
def test_every_command_refuses_a_broken_folder(
    command: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = byte_level(400 if command == "train" else 480)
    model = change(write_model(tmp_path / "model", vocabulary), without(DOWN))
    assert commands(copied, model, tmp_path)[command]() in (1, 2)
    message = f"{model}: its weights don't fit its configuration: 1 missing ({DOWN}): download all"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize("command", ["train", "transfer"])
def test_a_model_that_could_not_be_loaded_again_is_not_made(
    command: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text model of Emu3, and of Llama 3.2's vision models, has a model_type of its own."""
    folder = write_model(tmp_path / "model", byte_level(400 if command == "train" else 480))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    whole = AutoConfig.for_model("emu3", text_config=sizes | ends)
    AutoModelForCausalLM.from_config(whole).save_pretrained(folder)
    whole.save_pretrained(folder)
    assert commands(copied, folder, tmp_path)[command]() in (1, 2)
    told = 'Emu3ForCausalLM is saved with the model_type "emu3_text_model", which AutoModelForCaus'
    assert told in capsys.readouterr().err


def test_random_weights_need_none(copied: Path, tmp_path: Path) -> None:
    model = change(write_model(tmp_path / "model", byte_level(400)), without(DOWN))
    (model / "model.safetensors").unlink()
    run = ["--data", str(copied / "data"), "--student", str(model), "--random-init"]
    run += ["--method", "full", "--seq-length", "64", "--num-steps", "1", "--warmup-steps", "0"]
    run += ["--global-batch-size", "1", "--micro-batch-size", "1", "--device", "cpu"]
    assert train([*run, "--output", str(tmp_path / "run")]) == 0


def with_code(folder: Path, ran: Path, kind: str) -> Path:
    """Give a model's folder code that writes a file when it is run."""
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as OwnModel\n"
    )
    named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    return change(folder, model_type=kind, auto_map=named)


@pytest.mark.parametrize("command", ["train", "score", "transfer", "acceptance"])
def test_a_folder_s_own_code_is_never_run(
    command: str,
    copied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody is asked: transformers would, and run it on `y`."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks"))
    vocabulary = byte_level(400 if command == "train" else 480)
    model = with_code(write_model(tmp_path / "model", vocabulary), tmp_path / "ran", "own")
    assert commands(copied, model, tmp_path)[command]() in (1, 2)
    message = f"{model} brings code of its own (auto_map), which is never run: name a model"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_an_architecture_that_transformers_has_needs_no_code_of_a_folder(tmp_path: Path) -> None:
    """As DeepSeek's published folders have it."""
    model = with_code(write_model(tmp_path / "model", byte_level(400)), tmp_path / "ran", "llama")
    load_language_model(str(model))
    assert not (tmp_path / "ran").exists()


def test_what_transformers_raises_becomes_a_sentence(tmp_path: Path) -> None:
    folder = change(write_model(tmp_path, byte_level(400)), rope_parameters=[1])
    with pytest.raises(ForeignCodeError, match=rf"^{tmp_path}: its code in transformers 5\.\S+ en"):
        load_language_model(str(folder))


def test_a_package_that_weights_need_is_the_remedy() -> None:
    """Such as that of 4-bit weights, which transformers names."""
    told = r"^models/four: needs bits: `pip install bits`$"
    with pytest.raises(ForeignCodeError, match=told), foreign_code("models/four"):
        raise ImportError("needs bits:\n`pip install bits`")


def test_a_torch_without_kernels_for_a_gpu_is_not_the_model_s_fault() -> None:
    """Another release of transformers was the remedy."""
    told = (
        r"^V: torch 2\S+ was built without kernels for this GPU \(CUDA error: no kernel image\): i"
    )
    with pytest.raises(ForeignCodeError, match=told) as refused, foreign_code("V"):
        raise RuntimeError(
            "CUDA error: no kernel image\nSearch for `cudaErrorNoKernelImageForDevice'"
        )
    assert hints_of(refused.value) == ["hint: device=cpu"]


def test_a_tokenizer_s_own_code_is_not_run_either(tmp_path: Path) -> None:
    model = with_code(write_model(tmp_path / "model", byte_level(400)), tmp_path / "ran", "own")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.A", "own.B"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    find_tokenizer(str(model))
    assert not (tmp_path / "ran").exists()
