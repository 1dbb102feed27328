"""`vocag acceptance`: how well one model drafts for another."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pipeline.command_line.option_parsing import ModelSource, Option, parse_options, require_least
from pipeline.drawing.printing import prints

_EPILOG = """\
examples:
  vocag acceptance models/target models/draft --text corpus.jsonl
      Continue the beginnings of 20 texts, greedily and sampled.

Models with one tokenizer are compared token by token; sampled is speculative sampling, as servers
do it. With two, the draft's text is tokenized again by the target's tokenizer, as in transformers'
universal assisted generation; matched is how often its sample is the target's, which is less.
Length is how many tokens come out of one pass of the target, its own token among them: 1.0 gains
nothing."""


@dataclass(frozen=True)
class AcceptanceOptions:
    """Measure how many of a draft's tokens its target accepts in speculative decoding.

    Attributes:
        target: folder or Hugging Face repository of the model that decides.
        draft: folder or Hugging Face repository of the model that proposes.
        text: .jsonl and .txt files or aligned datasets whose texts' beginnings are continued.
        prompts: number of texts.
        prompt_bytes: length of a beginning.
        tokens: target tokens of a continuation.
        proposed: tokens that the draft proposes in a round.
        text_field: field of each line that holds the text.
        seed: seed of the sampled continuations.
    """

    target: Annotated[ModelSource, Option("TARGET", form="positional")]
    draft: Annotated[ModelSource, Option("DRAFT", form="positional")]
    text: tuple[str, ...]
    prompts: int = 20
    prompt_bytes: int = 400
    tokens: int = 64
    proposed: int = 5
    text_field: Annotated[str, Option("NAME")] = "text"
    seed: int = 0

    def __post_init__(self) -> None:
        require_least(self, "prompts", "prompt_bytes", "proposed")
        require_least(self, "tokens", least=2)


@prints("vocag acceptance")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Return the command's output."""
    return _measure(parse_options(AcceptanceOptions, argv, prog="vocag acceptance", epilog=_EPILOG))


def _measure(options: AcceptanceOptions) -> Iterator[str]:
    # help does without all of these
    from itertools import islice

    import torch
    from tqdm import tqdm

    from pipeline.dataset.texts import read_texts
    from pipeline.models.fit import tokenize_alike
    from pipeline.models.teacher_files import find_folder
    from pipeline.models.weights import load_weights
    from pipeline.tokenization import load_tokenizer
    from pipeline.tokenization.pieces import start_of
    from pipeline.transfer.acceptance import (
        Acceptance,
        TokenizedModel,
        judge_servers,
        measure_acceptance,
    )

    def load(source: str) -> TokenizedModel:
        folder = find_folder(source, role="model")
        return TokenizedModel(load_weights(folder, dtype="auto"), load_tokenizer(str(folder)))

    texts = read_texts(options.text, text_field=options.text_field)
    prompts = [
        start_of(document.text, options.prompt_bytes)
        for document in islice((one for one in texts if one.text), options.prompts)
    ]
    if not prompts:
        raise ValueError(f"--text {' '.join(options.text)} holds no text")
    target, draft = load(options.target), load(options.draft)
    shared = tokenize_alike(target.tokenizer, draft.tokenizer)
    yield f"{len(prompts)} prompts, {'one vocabulary' if shared else 'two vocabularies'}"
    yield from judge_servers(target, draft)
    for name, sampled in (("greedy", False), ("sampled" if shared else "matched", True)):
        torch.manual_seed(options.seed)
        each = measure_acceptance(
            target,
            draft,
            prompts,
            sampled=sampled,
            num_tokens=options.tokens,
            num_proposed=options.proposed,
        )
        bar = tqdm(each, total=len(prompts), desc=name, disable=None)
        found = sum(bar, Acceptance())
        yield (
            f"  {name:<8} rate {found.rate:.3f}, length {found.length:.2f} "
            f"({found.accepted:.0f} of {found.proposed:.0f} proposed tokens accepted in "
            f"{found.rounds:.0f} rounds)"
        )
