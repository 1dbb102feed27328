"""Draw the first lines of an aligned document as a picture, as `vocag explore preview` draws pages.

    python examples/preview_picture.py demo/aligned --max-tokens 26 --output preview.svg

It follows the reader's light or dark theme. docs/figures/preview.svg is the demo's document
scipy/stats/_ksstats.py:571:kolmogni.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipeline.drawing.blocks import Block
from pipeline.drawing.page_blocks import STYLE as BLOCK_STYLE
from pipeline.drawing.page_blocks import draw_block
from pipeline.drawing.web_page import STYLE, tag
from pipeline.explore.preview import load_previews
from vocag import open_dataset

WIDTH, GAP, LEADING = 860.0, 5.0, 12.0


def draw_picture(blocks: Iterable[Block]) -> Element:
    """Return one SVG with the blocks in lines, from left to right."""
    x, y, height, placed = 0.0, 0.0, 0.0, []
    for block in blocks:
        drawn = draw_block(block)
        width, height = float(drawn.attrib["width"]), float(drawn.attrib["height"])
        if x + width > WIDTH:
            x, y = 0.0, y + height + LEADING
        drawn.attrib |= {"x": f"{x:.1f}", "y": f"{y:.1f}"}
        placed.append(drawn)
        x = WIDTH if any("⏎" in token.text for token in block.student) else x + width + GAP
    size = {"viewBox": f"0 0 {WIDTH:.0f} {y + height:.0f}", "xmlns": "http://www.w3.org/2000/svg"}
    return tag("svg", tag("style", STYLE + BLOCK_STYLE), *placed, **size)


def main() -> None:
    """Draw one document."""
    parser = argparse.ArgumentParser(description="Draw both tokenizations of a document as an SVG.")
    parser.add_argument("dataset")
    parser.add_argument("--id", help="of the document; by default the first one")
    parser.add_argument("--max-tokens", type=int, default=40, help="student tokens that are drawn")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    (document,) = load_previews(
        open_dataset(options.dataset),
        num_documents=1,
        document_id=options.id,
        max_tokens=options.max_tokens,
    )
    options.output.write_bytes(ElementTree.tostring(draw_picture(document.blocks)))
    print(f"{options.output}: {document.num_shown} student tokens of {document.title}")


if __name__ == "__main__":
    main()
