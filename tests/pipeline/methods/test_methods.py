"""The methods by their names: each with its needs and the paper's defaults."""

from typing import Any, get_args

import pytest

from pipeline.methods import METHODS, kind_of
from pipeline.methods.kind import Served
from pipeline.methods.method import Method
from pipeline.scoring.teaching import Teaching
from pipeline.selection_rule import SelectionRule, Selector
from pipeline.training.command import parse_config
from schemas.distribution_rule import EntryShape

# Of each: what tokens are ranked by, what is needed of the teacher, the share and λ.
PAPER = {
    "teacher": ("teacher", "losses", 0.4, 1.0),
    "full": ("full", "nothing", 0.4, 1.0),
    "random": ("random", "nothing", 0.4, 1.0),
    "student_loss": ("student_loss", "nothing", 0.4, 1.0),
    "student_entropy": ("student_entropy", "nothing", 0.4, 1.0),
    "teacher_loss": ("teacher_loss", "losses", 0.4, 1.0),
    "alm": ("teacher", "losses", 0.0, 1.0),
    "distill": ("teacher", "distributions", 0.4, 0.8),
    "kld": ("full", "model", 0.4, 1.0),
    "uld": ("full", "model", 0.4, 0.5),
    "rho1": ("full", "model", 0.6, 1.0),
    "rho1_self": ("full", "model", 0.7, 1.0),
    "chunks": ("teacher", "losses", 0.4, 1.0),
    "chunks_random": ("random", "nothing", 0.4, 1.0),
}


def test_each_method_has_its_needs_and_its_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    for name, kind in METHODS.items():
        rule = kind.rule(Method(name))
        found[name] = (rule.selector, kind.needs, rule.keep_fraction, kind.weight)
    assert found == PAPER
    selectors = set(get_args(Selector)) - {"teacher_entropy"}  # which needs distributions
    assert METHODS.keys() > selectors, "a selector is a method"
    assert [n for n, kind in METHODS.items() if kind.one_vocabulary] == ["kld", "rho1", "rho1_self"]
    assert [n for n, kind in METHODS.items() if kind.every_token] == ["alm"]
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    told = capsys.readouterr().out
    assert all(kind.help in told for kind in METHODS.values())


def test_options_of_a_method_are_checked() -> None:
    given = METHODS["rho1"].rule(Method("rho1", keep_fraction=0.0, scope="row", seed=3))
    assert given == SelectionRule("full", keep_fraction=0.0, scope="row", seed=3)
    with pytest.raises(ValueError, match=r"keep_fraction must lie in 0\.\.1, got 40"):
        Method("teacher", keep_fraction=40)
    with pytest.raises(ValueError, match="method=best: choose one of teacher, full, random, "):
        kind_of(Method("best"))
    for option, value in (("temperature", 2.0), ("distill_tokens", "kept")):
        with pytest.raises(
            ValueError, match=f"{option}={value} is for method=distill: leave it out"
        ):
            kind_of(Method("kld", **{option: value}))
    with pytest.raises(ValueError, match=r"top_k=256 must lie in 1\.\.255"):
        Teaching(top_k=256)
    with pytest.raises(ValueError, match=r"temperature=0 must be above 0"):
        Method("distill", temperature=0)
    with pytest.raises(ValueError, match=r"weight=-1 must be 0 or more and finite"):
        Method("distill", weight=-1)
    with pytest.raises(ValueError, match=r"weight=1\.5 must be at most 1 with method=distill"):
        kind_of(Method("distill", weight=1.5))
    kind_of(Method("alm", weight=1.5))


@pytest.mark.parametrize(
    "method",
    [
        Method("full", keep_fraction=0.3),
        Method("uld", unmapped="exclude"),
        Method("kld", scope="row"),
        Method("distill", keep_fraction=0.3),
    ],
)
def test_options_that_choose_tokens_are_refused_where_none_are_chosen(method: Method) -> None:
    with pytest.raises(ValueError, match=f"method={method.name} learns all.*: leave it out"):
        kind_of(method)


def test_options_that_choose_tokens_are_read_where_some_are_chosen() -> None:
    for name in METHODS.keys() - {"full", "kld", "uld", "distill"}:
        kind_of(Method(name, keep_fraction=0.3, scope="row"))
    kind_of(Method("distill", keep_fraction=0.3, distill_tokens="kept"))


_CHOICES = {"unmapped": "exclude", "aggregation": "sum", "expectation": "all"}


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"name": "teacher"}, ()),
        ({"name": "teacher_loss"}, ()),
        ({"name": "random"}, ("aggregation",)),
        ({"name": "student_loss"}, ("aggregation",)),
        ({"name": "student_entropy"}, ("aggregation",)),
        ({"name": "rho1"}, ("unmapped", "aggregation")),
        ({"name": "rho1_self"}, ("unmapped", "aggregation")),
        ({"name": "chunks"}, ("unmapped", "aggregation")),
        ({"name": "chunks_random"}, ("unmapped", "aggregation")),
        ({"name": "alm"}, ("expectation",)),
        ({"name": "distill", "distill_tokens": "kept"}, ("expectation",)),
        (
            {"name": "distill", "distill_tokens": "kept", "distill_by": "random"},
            ("unmapped", "aggregation", "expectation"),
        ),
    ],
)
def test_an_option_that_the_choice_doesnt_read_is_refused(
    given: dict[str, Any], unread: tuple[str, ...]
) -> None:
    for option, value in _CHOICES.items():
        method = Method(**given, **{option: value})
        if option in unread:
            with pytest.raises(ValueError, match=f"{option}={value} changes nothing with method="):
                kind_of(method)
        else:
            kind_of(method)


def test_a_method_of_ones_own_is_named_as_a_module() -> None:
    assert kind_of(Method("tests.support.own_method")).name == "weighed"
    with pytest.raises(ValueError, match=r"temperature=2\.0 is for .*: leave it out with weighed"):
        kind_of(Method("tests.support.own_method", temperature=2.0))
    with pytest.raises(
        ValueError, match=r"method=json\.decoder: that module's KINDS must hold one"
    ):
        kind_of(Method("json.decoder"))
    with pytest.raises(
        ValueError, match=r"method=nowhere\.at_all: Python finds no module nowhere;"
    ):
        kind_of(Method("nowhere.at_all"))
    with pytest.raises(ValueError, match=r"finds no module json\.nowhere;"):
        kind_of(Method("json.nowhere"))


@pytest.mark.parametrize(
    ("options", "asked", "expected"),
    [
        ({}, {}, (16, 4)),
        ({}, {"top_k": 8}, (8, 4)),
        ({}, {"top_k": 8, "draws": 0}, (8, 0)),
        ({}, {"top_k": 8, "draws": 2}, (8, 2)),
        ({}, {"top_k": 252}, (252, 0)),
        ({"temperature": 2.0}, {}, (16, 0)),
        ({"reverse_kl": True}, {}, (16, 0)),
    ],
)
def test_a_running_teacher_draws_where_the_loss_allows(
    options: dict[str, Any], asked: dict[str, Any], expected: tuple[int, int]
) -> None:
    method = Method("distill", **options)
    served = kind_of(method).serve(method, Teaching(teacher="t", **asked))
    top_k, drawn = expected
    assert served == Served("running", True, EntryShape(top_k + 1, drawn))
