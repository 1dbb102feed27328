"""Which answers are one, and which only look like it."""

from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs vocag[evaluate]")

from pipeline.evaluation.answers import answer_of, reference_of
from pipeline.evaluation.equality import is_equal
from pipeline.evaluation.set_files import read_items

SHARED = Path(__file__).parents[4] / "shared" / "data" / "benchmarks"


def pairs(table: str) -> list[tuple[str, str]]:
    """Each line is an answer and spellings."""
    lines = (line.split("  |  ") for line in table.strip().splitlines())
    return [(answer, other) for answer, *others in lines for other in others]


# Spellings of one answer; on the left are MATH's, and others that the sets have.
EQUAL = pairs(r"""
18.0  |  18
18  |  18.
1200  |  $1,200  |  1200 seats
5  |  5 square metres  |  5 m  |  5cm
0.25  |  25%
25\%  |  25
12  |  1200  |  0.12
1/3  |  0.3333333
\frac12  |  \dfrac{1}{2}  |  \tfrac{1}{2}
\frac{1}{2}  |  0.5
\frac9{19}  |  0.4736842105  |  9/19  |  \frac{27}{57}
\frac14  |  \frac{1}{4}
137 \frac{1}{2}  |  \frac{275}{2}
(x+1)^2  |  x^2+2x+1
(2,3)  |  (2, 3)
[-2,2]  |  [-2, 2]
\sqrt{12}  |  2\sqrt{3}
2\sqrt{3}  |  \sqrt12
2\sqrt{5}  |  2 \cdot \sqrt{5}  |  2*sqrt(5)
\sqrt{5}  |  2.2361
20000\pi  |  62831.85
june  |  June
\text{Evelyn}  |  \text{Evelyn}
\text{(B)}  |  (B)  |  \textbf{(B)}
\text{even}  |  \text{EVEN}
(-\sqrt{3}, \sqrt{3})  |   ( - \sqrt  { 3 }  ,   \sqrt  { 3 }  )  |  (-\sqrt3, \sqrt3)
(-\sqrt{3}, \sqrt{3})  |  \left(-\sqrt{3}, \sqrt{3}\right)  |  (-sqrt(3), sqrt(3))
\left( \frac{3}{2}, -13 \right)  |  ( \frac{3}{2}, -13 )
\left(\frac{3}{5},\frac{8}{3}\right]  |  (0.6, 2.6667]
\frac13, 2  |  0.33333, 2
\{1\pm\sqrt{5},-2\}  |  \{1\pm\sqrt{5},\ -2\}
(0,9) \cup (9,36)  |  (0,\ 9) \cup (9,\ 36)
\begin{pmatrix} 1/3 \\ 2 \end{pmatrix}  |  \begin{bmatrix} 0.3333 \\ \sqrt{4} \end{bmatrix}
\begin{pmatrix} -7 \\ 16 \end{pmatrix}  |  \left(\begin{array}{c} -7 \\ 16 \end{array}\right)
\begin{pmatrix} 1/5 \\ -3 \end{pmatrix}  |  \begin{pmatrix} \frac{1}{5} \\ -3 \end{pmatrix}
11,\! 111,\! 111,\! 100  |  11111111100
2107  |  2,107
4  |  x = 4
x \in [-2,7]  |  [-2,7]
y = -2x  |  -2x
76^\circ  |  76^{\circ}  |  76  |  76 \text{ degrees}
864 \mbox{ inches}^2  |  864\mbox{inches}^2  |  864
15\mbox{ cm}^2  |  15 \text{ cm}^2
\$32,\!348  |  32348
.35625  |  0.35625
204_5  |  204_{5}
""")
DIFFERENT = pairs(r"""
18  |  19  |  18.01  |  -18  |  18. Then we multiply by 2  |  we take 18
12  |  120
June  |  May
\frac{1}{2}  |  \frac{1}{3}
\frac{1}{3}  |  0.334
\frac9{19}  |  0.474158  |  \frac{19}{9}
(x+1)^2  |  x^2+2x
(2,3)  |  (3,2)
(2, 0.3333)  |  (0.3333, 2)
[-2,2]  |  [-2,2)
(5,\infty)  |  [5,\infty)
(-\infty, 0]  |  (-\infty, 0)
\left(\frac{3}{5},\frac{8}{3}\right]  |  \left(\frac{3}{5},\frac{8}{3}\right)
2  |  2k
2w  |  2k
204_5  |  204
204  |  204_5
40_9  |  40_{10}
34  |  3 4
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  |  \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} -7 \\ 16 \end{pmatrix}  |  \begin{pmatrix} 16 \\ -7 \end{pmatrix}
5  |  5 apples and 3 pears
(a+5)(b+2)  |  a+5b+2  |  (+5)(b+2)
x^3+3x-6  |  x^3+3-6
\frac{11+9a}{20}  |  \frac{11-9a}{20}
76^\circ  |  -76^\circ
\sqrt{5}  |  -\sqrt{5}
\text{(B)}  |  (C)
5r^5  |  5r^6  |  5w^5
2\sqrt{5}  |  2\sqrt{15}
\{1\pm\sqrt{5},-2\}  |  \{1\pm\sqrt{5}
1,-2  |  1
1 \pm \sqrt{19}  |  1 + \sqrt{19}
""")


def test_another_spelling_is_as_right() -> None:
    refused = [pair for pair in EQUAL if not is_equal(pair[1], pair[0])]
    assert refused == []
    text = "Final Answer: The final answer is ${}$. I hope it is correct."
    assert [pair for pair in EQUAL if not is_equal(answer_of(text.format(pair[1])), pair[0])] == []


def test_what_only_looks_like_an_answer_is_wrong() -> None:
    accepted = [pair for pair in [*DIFFERENT, ("18", ""), ("", "")] if is_equal(pair[1], pair[0])]
    assert accepted == []


@pytest.mark.parametrize("name", ["gsm8k", "math", "svamp", "tabmwp"])
def test_a_right_answer_to_another_question_is_mostly_wrong(name: str) -> None:
    """What accepts everything would pass the test above."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/benchmarks")
    items = read_items(name, str(SHARED))[:300]
    others = items[1:] + items[:1]
    accepted = sum(
        is_equal(reference_of(one.answer), reference_of(other.answer))
        for one, other in zip(items, others, strict=True)
    )
    assert accepted < 0.06 * len(items)
