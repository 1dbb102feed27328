"""`vocag explore scores --html`: texts at chosen quantiles, and their costly spots.

A spot is a run of windows of `SPOT_TOKENS` teacher tokens, each with more than `SPOT_FACTOR` times
the document's bits per byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.document_scores import ScoredDataset
from pipeline.dataset.files import Dataset
from pipeline.dataset.score_files import read_sidecar
from pipeline.dataset.tokenizers import text_in
from pipeline.drawing.charts import NOT_DRAWN, bar_chart, can_draw, draw_svg
from pipeline.drawing.formatting import format_count, format_plural
from pipeline.drawing.web_page import Child, render_page, tag
from pipeline.explore.scores import ScoreTable, bin_edges, count_bins, describe_thresholds, place_of
from pipeline.tokenization.pieces import character_start
from schemas.document import AlignedDocument, decode_document

SPOT_TOKENS, SPOT_FACTOR = 32, 2.0
SHOWN_BYTES = 4000
_CHARTED_GROUPS = 5

_STYLE: Final = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; margin: .5rem 0 0; }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: .8rem; margin-bottom: .8rem; }
.texts .card { padding: .8rem 1rem; min-width: 0; }
mark { background: var(--teacher-tint); color: inherit; border-bottom: 2px solid var(--teacher); }
figure { margin: 0; }
figure + pre { white-space: pre; overflow-x: auto; font-size: .76rem; margin: 0; }
"""


@dataclass(frozen=True)
class Spot:
    """A spot's bytes [start, stop) of the text."""

    start: int
    stop: int
    bits_per_byte: float


def find_spots(losses: NDArray[np.floating], byte_offsets: NDArray[np.integer]) -> list[Spot]:
    """Return a document's spots, in order.

    Losses are float [T], nats, NaN if missing; `byte_offsets` int [T, 2].
    """
    if len(losses) <= SPOT_TOKENS:
        return []
    bits = np.append(0, np.cumsum(np.nan_to_num(losses.astype(np.float64)))) / np.log(2)
    starts, stops = byte_offsets[:, 0], np.maximum.accumulate(byte_offsets[:, 1])
    num_bytes = np.maximum(1, stops[SPOT_TOKENS - 1 :] - starts[: 1 - SPOT_TOKENS])
    windows = (bits[SPOT_TOKENS:] - bits[:-SPOT_TOKENS]) / num_bytes
    # Of a chat only learned tokens may have a loss.
    scored_bytes = np.diff(stops, prepend=starts[0])[~np.isnan(losses)].sum()
    mean = bits[-1] / max(1, scored_bytes)
    is_costly = np.zeros(len(losses), np.bool_)
    for first in np.flatnonzero(windows > SPOT_FACTOR * mean):
        is_costly[first : first + SPOT_TOKENS] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_costly, [False]]))).reshape(-1, 2)
    found = []
    for first, end in edges.tolist():
        start, stop = int(starts[first]), int(stops[end - 1])
        found.append(Spot(start, stop, float(bits[end] - bits[first]) / max(1, stop - start)))
    return found


def render_scores(
    dataset: Dataset,
    scores: Mapping[str, ScoredDataset],
    table: ScoreTable,
    *,
    column: str,
    quantiles: Sequence[float],
    num_documents: int,
) -> str:
    """Return charts, thresholds, and documents around quantiles of the first score."""
    title = f"{dataset.manifest.name}: {column}"
    children: list[Child] = [tag("h1", title)]
    if not can_draw():
        children.append(tag("p", NOT_DRAWN, class_="soft small"))
    for name, values in table.values.items():
        children.append(tag("h2", name))
        lines = describe_thresholds(table, values, column, quantiles)
        values_kept = tag("pre", "\n".join(lines), class_="card")
        drawn = [_draw(table, values, name, column)] if can_draw() else []
        children.append(tag("div", *drawn, values_kept, class_="texts"))
    first = next(iter(table.values.values()))
    order = np.argsort(first, kind="stable")[: np.count_nonzero(~np.isnan(first))]
    for quantile in quantiles if len(order) else ():
        children.append(tag("h2", f"Around quantile {quantile:g}"))
        at = place_of(quantile, len(order))
        low = max(0, min(at - num_documents // 2, len(order) - num_documents))
        for row in order[low : low + num_documents].tolist():
            children.append(_document(dataset, scores, table, row, column))
    return render_page(title, *children, style=_STYLE)


def _draw(table: ScoreTable, values: NDArray[np.float64], name: str, column: str) -> Element:
    edges = bin_edges(values)
    shares = {}
    for group, chosen in table.groups()[:_CHARTED_GROUPS]:
        counts = count_bins(values[chosen], edges)
        shares[group or "all"] = (counts / max(1, counts.sum())).tolist()
    labels = [f"{edge:.3g}" for edge in edges[:-1]]
    x_label = f"{column} (from)"
    chart = bar_chart(name, labels, shares, x_label=x_label, y_label="share of documents")
    return tag("figure", draw_svg(chart), class_="card")


def _document(
    dataset: Dataset,
    scores: Mapping[str, ScoredDataset],
    table: ScoreTable,
    row: int,
    column: str,
) -> Element:
    shard, place = int(table.shard[row]), int(table.place[row])
    index = dataset.read_index(shard, with_names=True)
    ((_, sample),) = dataset.samples(shard, index, documents=[place])
    document = decode_document(sample)
    text = text_in(dataset, document)
    cards = []
    for name, own in scores.items():
        record = own.files.manifest.sidecars[shard]
        losses = read_sidecar(own.files, record, dataset.manifest.shards[shard])
        about = f"{name}: {column} {table.values[name][row]:.4g}"
        own_losses = losses.losses[losses.starts[place] : losses.starts[place + 1]]
        cards.append(_card(document, text, own_losses, about))
    return tag("div", *cards, class_="texts")


def _card(
    document: AlignedDocument, text: bytes | None, losses: NDArray[np.float16], about: str
) -> Element:
    spots = find_spots(losses, document.teacher.byte_offsets)
    children: list[Child] = [
        tag("h3", document.document_id),
        tag(
            "p",
            f"{about}, {format_count(document.num_text_bytes)} bytes, "
            f"{format_plural(len(spots), 'costly spot')}",
            class_="soft small",
        ),
    ]
    if text is None:
        children.append(tag("p", "Its text was not kept.", class_="soft"))
        return tag("div", *children, class_="card")
    children.append(tag("pre", *_marked(text, spots)))
    if len(text) > SHOWN_BYTES:
        later = sum(spot.start >= SHOWN_BYTES for spot in spots)
        more = f"{format_count(len(text) - SHOWN_BYTES)} more bytes"
        children.append(
            tag("p", f"{more} with {format_plural(later, 'costly spot')}", class_="soft small")
        )
    return tag("div", *children, class_="card")


def _marked(text: bytes, spots: Sequence[Spot]) -> list[Child]:
    """Return a text's start with spots marked; no character is cut."""
    children: list[Child] = []
    end, stop = 0, character_start(text, SHOWN_BYTES)
    for spot in spots:
        first = max(end, character_start(text, spot.start))
        last = min(stop, character_start(text, spot.stop))
        if first >= last:
            continue
        told = f"{spot.bits_per_byte:.3g} bits per byte"
        marked = tag("mark", text[first:last].decode(errors="replace"), title=told)
        children += [text[end:first].decode(errors="replace"), marked]
        end = last
    return [*children, text[end:stop].decode(errors="replace")]
