"""The code length of whole texts: one convention for `vocag evaluate` and for held-out sets."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

import tokenizers
import torch
from lm_eval.api.instance import Instance
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.evaluation.command import main
from pipeline.evaluation.likelihood import text_to_score
from pipeline.evaluation.results import read_results
from pipeline.evaluation.set_files import read_items
from pipeline.evaluation.settings import StudentEngine
from pipeline.evaluation.students import find_student, open_model
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.packing.reading import Reading
from pipeline.streaming import AlignedRows
from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.training.config import TrainConfig
from pipeline.training.held_out import evaluate, open_heldout
from pipeline.training.ranks import Ranks
from tests.support.chats import (
    FOLDER,
    NAMES,
    TWO_TURNS,
    align_chats_job,
    chat_tokenizer,
    said,
    user,
)
from tests.support.datasets import build_dataset, byte_level
from tests.support.hf_folders import write_model

TINY = str(Path(__file__).parents[2] / "data" / "evaluation")


def tokenizer(folder: Path, *, adds_bos: bool) -> Tokenizer:
    """One that puts <s> before a text itself, or leaves that to whoever asks it."""
    own = tokenizers.Tokenizer.from_str(byte_level(300).file_bytes.decode())
    if adds_bos:
        own.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    own.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder / "tokenizer.json"))


def one_step(student: Path, data: Path, output: Path) -> TrainConfig:
    """Describe a run that measures its own data as held out."""
    return TrainConfig(
        data=Reading(str(data)),
        student=str(student),
        output=output,
        method=Method("full"),
        num_steps=1,
        warmup_steps=0,
        seq_length=512,
        global_batch_size=1,
        micro_batch_size=1,
        heldout=(str(data),),
    )


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_costs_what_it_costs_as_a_held_out_document(adds_bos: bool, tmp_path: Path) -> None:
    """A tokenizer that adds BOS was charged for it: - log P(BOS | BOS) of each item."""
    own = tokenizer(tmp_path, adds_bos=adds_bos)
    student = write_model(tmp_path / "one", own)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (student / "tokenizer_config.json").write_text(json.dumps(ends))
    command = [str(student), "--data", TINY, "--output", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--tasks", "svamp", "--measures", "text"]) == 0
    found = read_results(tmp_path / "one").measurements["svamp"]["text"].values["bits_per_byte"]

    items = read_items("svamp", TINY)
    texts = [(str(place), text_to_score(item, "text")) for place, item in enumerate(items)]
    build_dataset(tmp_path / "heldout", texts, student=own)
    config = one_step(student, tmp_path / "heldout", tmp_path / "run")
    training = AlignedRows(config.stream)
    convention = training.rules.student
    assert (convention.first_token_id, convention.end_token_id) == (0, 1)
    model, heldout = load_language_model(str(student)), open_heldout(config.heldout_sets, training)
    measured = evaluate(config, model, heldout, Ranks(torch.device("cpu")))
    assert found.value == pytest.approx(measured["heldout_bits_per_byte"], rel=1e-5)


_CHATS = [
    TWO_TURNS,
    [user("Say \n😀!"), said("  naïve 😀\n")],
    [user("Again?"), said("Yes. " * 30)],
]
_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
"""ChatML with transformers' marks of what an assistant says, as TRL's templates have them."""


def test_a_chat_costs_what_an_assistant_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As recomputed with transformers' own masks, and as a held-out dataset."""
    student = write_model(tmp_path / "one", chat_tokenizer(320))
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
    (student / "tokenizer_config.json").write_text(json.dumps(ends))
    (student / "chat_template.jinja").write_bytes((FOLDER / "chatml.jinja").read_bytes())
    unusable: list[Any] = [
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": []},
        {"messages": [{"from": "human", "value": "Why?"}]},
        {"conversations": TWO_TURNS},
    ]
    usable = [{"messages": json.dumps(_CHATS[0])}, *({"messages": chat} for chat in _CHATS[1:])]
    lines = [json.dumps(row) for row in [*usable, *unusable]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    command = [str(student), "--data", str(tmp_path), "--output", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--tasks", "chats"]) == 0
    printed = capsys.readouterr().out
    assert "5 of 8 conversations are left out, such as item 4: message 0 has a part" in printed
    made = read_results(tmp_path / "one").measurements["chats"]
    assert [*made] == ["text"]
    assert (made["text"].num_items, made["text"].num_left_out) == (3, 5)
    found = made["text"].values["bits_per_byte"].value

    theirs, model = AutoTokenizer.from_pretrained(student), load_language_model(str(student))
    nats, num_bytes = 0.0, 0
    for chat in _CHATS:
        marked: Any = theirs.apply_chat_template(
            chat,
            chat_template=_MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids, mask = marked["input_ids"], torch.as_tensor(marked["assistant_masks"]).reshape(-1)
        with torch.inference_mode():
            losses = torch.nn.functional.cross_entropy(
                model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
            )
        nats += float(losses[mask[1:].bool()].double().sum())
        num_bytes += sum(len(m["content"].encode()) for m in chat if m["role"] == "assistant")
    assert found == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)

    held, _ = align_chats_job(tmp_path / "held", _CHATS, sides=("chatml", "chatml"))
    config = one_step(student, held, tmp_path / "run")
    rows = open_heldout(config.heldout_sets, AlignedRows(config.stream))
    held_out = evaluate(config, model, rows, Ranks(torch.device("cpu")))["heldout_bits_per_byte"]
    assert found == pytest.approx(held_out, rel=1e-5)
    assert main([str(student), "--tasks", "chats", "--output", str(tmp_path)]) == 2
    assert "--tasks chats needs --data and a folder" in capsys.readouterr().err


def chat_student(folder: Path, template: str) -> Path:
    """A small model that speaks by a template."""
    write_model(folder, chat_tokenizer(320))
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    return folder


def test_a_chat_that_begins_with_an_answer_has_the_loss_of_all_its_bytes(tmp_path: Path) -> None:
    """Its first token comes after BOS, as a text's; without one it had no loss, but its bytes."""
    student = chat_student(tmp_path / "one", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    chat = [said("It is four."), user("Two and two?"), said("Four, dear friend.")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    command = [str(student), "--data", str(tmp_path), "--output", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--tasks", "chats"]) == 0
    found = read_results(tmp_path / "one").measurements["chats"]["text"].values["bits_per_byte"]

    theirs, model = AutoTokenizer.from_pretrained(student), load_language_model(str(student))
    text = "".join(f"{m['content']}\n" for m in chat)
    made: Any = theirs(text, return_offsets_mapping=True, add_special_tokens=False)
    ids = torch.tensor([[theirs.bos_token_id, *made["input_ids"]]])
    with torch.inference_mode():
        losses = torch.nn.functional.cross_entropy(
            model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
        )
    wanted = {text.index(m["content"]) + n for m in chat[::2] for n in range(len(m["content"]))}
    counts = [not wanted.isdisjoint(range(*each)) for each in made["offset_mapping"]]
    nats = float(losses[torch.tensor(counts)].double().sum())
    assert found.value == pytest.approx(nats / math.log(2) / len(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('I refuse') }}", "TemplateError: I refuse"), ("{{ x", "SyntaxError")],
)
def test_a_template_that_refuses_is_named_with_its_file(
    template: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = chat_student(tmp_path / "one", template)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": TWO_TURNS}))
    command = [str(student), "--data", str(tmp_path), "--output", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--tasks", "chats"]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert f"change chat_template in {student / 'tokenizer_config.json'}\n" in told
    assert "--" not in told


def test_a_bf16_student_s_likelihoods_are_not_rounded(tmp_path: Path) -> None:
    """Their sum of some hundred nats had steps of two."""
    write_model(tmp_path / "student", byte_level(300), seed=1)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "student" / "tokenizer_config.json").write_text(json.dumps(ends))
    own = load_language_model(str(tmp_path / "student"), dtype=torch.bfloat16)
    model = open_model(find_student(str(tmp_path / "student")), StudentEngine(dtype="bfloat16"))
    ids = torch.arange(3, 123)
    with torch.inference_mode():
        logits = own(ids[None]).logits[0, :-1].float()
    expected = -torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    ((found, _),) = model._loglikelihood_tokens([(("", ""), ids[:1].tolist(), ids[1:].tolist())])
    assert found == pytest.approx(float(expected), abs=0.05)
    assert found % 1 > 0


def test_questions_that_change_how_others_are_read_are_asked_one_at_a_time(tmp_path: Path) -> None:
    """As of Phi-3's 128k: a short question's likelihood depended on its neighbours."""
    folder = write_model(tmp_path / "student", byte_level(300), seed=1)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    rotation = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    places = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    shape = AutoConfig.for_model(
        "phi3", **sizes, **places, rope_parameters=rotation, pad_token_id=0, eos_token_id=1
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    one, two = (
        open_model(find_student(str(folder)), StudentEngine(batch_size=n, device="cpu"))
        for n in (1, 2)
    )
    short, fits, long = ((("", ""), [3], [*range(4, n)]) for n in (20, 68, 69))
    found, alone = (model._loglikelihood_tokens([short, fits]) for model in (two, one))
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in alone], abs=1e-3)
    assert one._loglikelihood_tokens([short, long])[0] == alone[0]
    with pytest.raises(ValueError, match=r"^2 questions .* more than 64 \(longrope\)") as refused:
        two._loglikelihood_tokens([short, long])
    assert refused.value.__notes__ == ["hint: batch_size=1"]
    how = {"until": [], "max_gen_toks": 64, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, how), 0) for text in ("One", "One and one")]
    with pytest.raises(ValueError, match=r"^2 questions at a time have up to \d+ tokens with"):
        two.generate_until(asked)


def test_a_student_that_reads_padding_answers_one_question_at_a_time(tmp_path: Path) -> None:
    """RWKV ignores the mask: answers depended on the longest question of the batch."""
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    how = {"until": [], "max_gen_toks": 4, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, how), 0) for text in ("One", "One and one")]
    for kind, more in (("rwkv", {}), ("llama", {"num_attention_heads": 4})):
        folder = write_model(tmp_path / kind, byte_level(300), seed=1)
        (folder / "tokenizer_config.json").write_text(json.dumps(ends))
        shape = AutoConfig.for_model(kind, **sizes, **more, pad_token_id=0, eos_token_id=1)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    llama, rwkv, alone = (
        open_model(find_student(str(tmp_path / kind)), StudentEngine(batch_size=n, device="cpu"))
        for kind, n in (("llama", 2), ("rwkv", 2), ("rwkv", 1))
    )
    assert len(llama.generate_until(asked)) == len(alone.generate_until(asked)) == 2
    with pytest.raises(ValueError, match=r"^2 questions at a time: .*\(rwkv\)") as refused:
        rwkv.generate_until(asked)
    assert refused.value.__notes__ == ["hint: batch_size=1"]


def test_a_student_that_reads_both_ways_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "student", byte_level(300))
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    open_model(find_student(str(folder)), StudentEngine(device="cpu"))
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"is_causal": False}))
    with pytest.raises(ValueError, match=r"\(llama\) reads texts in both directions"):
        open_model(find_student(str(folder)), StudentEngine(device="cpu"))
