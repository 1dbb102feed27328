"""Self-contained HTML pages: no scripts, no requests, light and dark, text always escaped."""

import re
from typing import Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Child = Element | str

_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2127; --soft: #5c6470; --line: #e2e3e0;
  --student: #2563b8; --teacher: #c2681a; --student-tint: #e8f0fb; --teacher-tint: #fcf0e4;
  --good: #1f7a4d; --warn: #a4501a; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1c1f25; --ink: #e7e9ec; --soft: #9aa3af; --line: #2e333b;
    --student: #76a9f0; --teacher: #eda35d; --student-tint: #1d2c42; --teacher-tint: #3a2a1b;
    --good: #66c796; --warn: #eda35d; --bad: #f28b82;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; font-weight: 650; margin: 0 0 .35rem; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 2.75rem 0 .9rem; }
h3 { font-size: .95rem; font-weight: 600; margin: 0 0 .2rem; }
p { margin: .35rem 0; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .86em; }
code { overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.small { font-size: .86rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
.student { color: var(--student); } .teacher { color: var(--teacher); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
"""


def tag(name: str, /, *children: Child, **attributes: str) -> Element:
    """Return an element; `class_` means `class` and `stroke_width` means `stroke-width`.

    Example:
        >>> ElementTree.tostring(tag("p", "1 < 2", class_="soft"), encoding="unicode")
        '<p class="soft">1 &lt; 2</p>'
    """
    values = {key.rstrip("_").replace("_", "-"): clean(str(v)) for key, v in attributes.items()}
    element = Element(name, values)
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif last is None:
            element.text = (element.text or "") + clean(child)
        else:
            last.tail = (last.tail or "") + clean(child)
    return element


def render_page(title: str, *children: Child, style: str = "") -> str:
    """Return a whole HTML document around some contents."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", STYLE + style),
    )
    page = tag("html", head, tag("body", tag("main", *children)), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(page, encoding="unicode", method="html")


def clean(text: str) -> str:
    r"""Replace control characters and lone surrogates, which HTML can't hold.

    Example:
        >>> clean("a\x00")
        'a␀'
    """
    text = text.encode("utf-8", "replace").decode()
    return _CONTROL.sub(lambda c: chr(0x2421 if c[0] == "\x7f" else 0x2400 + ord(c[0])), text)
