"""A text's tokens that a teacher keeps (paper, Fig. 8)."""

from dataclasses import dataclass
from math import isnan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.drawing.blocks import PreviewDocument, PreviewToken, lay_out
from pipeline.drawing.formatting import format_count, format_share
from pipeline.drawing.page_blocks import Mark, render_preview
from pipeline.drawing.web_page import tag
from pipeline.guidance import Aggregation, SelectionRule, aggregate_teacher_losses, select_tokens
from pipeline.losses.cross_entropy import score_tokens
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.models.weights import refuse_nonsense
from pipeline.tokenization import Tokenizer

_LEGEND = (
    ("student kept", "kept, with an arrow: the teacher guides this token"),
    ("student dropped", "dropped, with a dashed line"),
    ("student unmapped", "unmapped"),
)


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """A text's student tokens and the values that decided about each.

    Attributes:
        document: both sides' tokens, aligned.
        student_losses: float64 [T_student], nats; NaN without a context.
        guidance: the teacher's, float64 [T_student], nats; NaN = unmapped.
        kept: bool [T_student].
        threshold: the smallest kept difference, nats, or NaN.
    """

    document: PreviewDocument
    student_losses: NDArray[np.float64]
    guidance: NDArray[np.float64]
    kept: NDArray[np.bool_]
    threshold: float

    @property
    def student(self) -> list[PreviewToken]:
        """Tokens in order."""
        return [token for block in self.document.blocks for token in block.student]


def score_text(
    text: str,
    *,
    student: tuple[str, Tokenizer],
    teacher: tuple[str, Tokenizer],
    keep_fraction: float,
    aggregation: Aggregation,
) -> KeptTokens:
    """Score a text with both models and choose the tokens to keep.

    Each side is a model (folder or repository) and its tokenizer. `keep_fraction` of the mapped
    tokens is kept, by Φ = `aggregation`.

    Raises:
        ValueError: a text that is empty, can't be tokenized, or exceeds a context.

    Source: Eq. 2 and 4.
    """
    data = text.encode("utf-8", "surrogatepass")
    batch = align_batch([SourceDocument("text", data)], student[1], teacher[1])
    for _, reason in batch.failures:
        raise ValueError(f"the text can't be aligned: {reason}")
    if not len(batch.student.input_ids):
        raise ValueError("the text is empty")
    student_losses, student_mask = _score(*student, batch.student.input_ids)
    teacher_losses, teacher_mask = _score(*teacher, batch.teacher.input_ids)
    guidance = aggregate_teacher_losses(
        teacher_losses,
        torch.from_numpy(batch.teacher_spans)[None],
        aggregation,
        teacher_loss_mask=teacher_mask,
    )
    selection = select_tokens(
        student_losses,
        guidance,
        loss_mask=student_mask,
        rule=SelectionRule(keep_fraction=keep_fraction),
    )
    sides = (batch.student, batch.teacher, batch.teacher_spans)
    return KeptTokens(
        document=lay_out("The text", data, *sides, num_text_bytes=len(data)),
        student_losses=student_losses[0].double().numpy(),
        guidance=guidance[0].double().numpy(),
        kept=selection.kept[0].numpy(),
        threshold=float(selection.threshold[0]),
    )


def describe_kept(tokens: KeptTokens) -> str:
    """Describe the counts."""
    num_tokens, num_kept = len(tokens.kept), int(tokens.kept.sum())
    mapped = ~np.isnan(tokens.guidance)
    return (
        f"{format_count(num_tokens)} student tokens, {format_share(int(mapped.sum()), num_tokens)} "
        f"mapped, {format_share(num_kept, num_tokens)} kept (threshold {tokens.threshold:.2f} "
        f"nats); mean loss: student {np.nanmean(tokens.student_losses):.2f}, teacher over mapped "
        f"tokens {tokens.guidance[mapped].mean():.2f} nats"
    )


def draw_kept(tokens: KeptTokens, student: str, teacher: str) -> str:
    """Return a self-contained page."""
    title = "Which tokens the teacher keeps"
    names = (tag("span", student, class_="student"), tag("span", teacher, class_="teacher"))
    head = [
        tag("h1", title),
        tag("p", "Student ", names[0], " above, teacher ", names[1], " below."),
        tag("p", describe_kept(tokens)),
        tag("p", "Rest the pointer on a token for its losses in nats.", class_="soft small"),
    ]
    return render_preview(title, head, [tokens.document], legend=_LEGEND, marks=_marks(tokens))


@torch.inference_mode()
def _score(source: str, tokenizer: Tokenizer, ids: NDArray[np.uint32]) -> tuple[Tensor, Tensor]:
    """Return losses of a text's tokens and which are defined, [1, T] each."""
    model = load_language_model(source, packed=False)
    refuse_nonsense(model, source)
    context = tokenizer.around_text.first_token_id
    tokens = [*([] if context is None else [context]), *ids.tolist()]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(tokens) > limit:
        raise ValueError(f"the text has {len(tokens)} tokens, {source} can see {limit}: shorten it")
    input_ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    hidden = hidden_states(model, input_ids, position_ids=positions)
    mask = positions > 0
    losses = score_tokens(hidden, output_layer(model), input_ids, teacher_loss_mask=mask)
    num_added = len(tokens) - len(ids)
    return losses[:, num_added:], mask[:, num_added:]


def _marks(tokens: KeptTokens) -> dict[int, Mark]:
    covering = [token.text for block in tokens.document.blocks for token in block.teacher]
    return {
        token.index: Mark(
            "kept" if tokens.kept[token.index] else "dropped",
            _hint(tokens, token, " | ".join(covering[slice(*token.mapped)])),
            unmapped=isnan(tokens.guidance[token.index]),
        )
        for token in tokens.student
    }


def _hint(tokens: KeptTokens, token: PreviewToken, covering: str) -> str:
    i = token.index
    student, teacher = tokens.student_losses[i], tokens.guidance[i]
    verdict = "kept" if tokens.kept[i] else "dropped"
    if isnan(student):
        return f"{token.text}: no context, no loss"
    if isnan(teacher):
        return f"{token.text}: student loss {student:.2f}, unmapped: {verdict}"
    return (
        f"{token.text}: student loss {student:.2f}, teacher loss {teacher:.2f} "
        f"({covering}), difference {student - teacher:+.2f}: {verdict}"
    )
