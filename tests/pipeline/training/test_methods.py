"""The methods by their names: what the command line offers, and what each says of itself."""

from typing import get_args

import pytest

from pipeline.guidance.rule import SelectionRule, Selector
from pipeline.training import options
from pipeline.training.method import Method, MethodName
from pipeline.training.methods import METHODS

# Of each: what tokens are ranked by, what is needed of the teacher, the share and λ.
PAPER = {
    "teacher": ("teacher", "losses", 0.4, 1.0),
    "full": ("full", "nothing", 0.4, 1.0),
    "random": ("random", "nothing", 0.4, 1.0),
    "student_loss": ("student_loss", "nothing", 0.4, 1.0),
    "student_entropy": ("student_entropy", "nothing", 0.4, 1.0),
    "teacher_loss": ("teacher_loss", "losses", 0.4, 1.0),
    "alm": ("teacher", "losses", 0.0, 1.0),
    "kld": ("full", "model", 0.4, 1.0),
    "uld": ("full", "model", 0.4, 0.5),
    "rho1": ("full", "model", 0.6, 1.0),
    "rho1_self": ("full", "model", 0.7, 1.0),
    "chunks": ("teacher", "losses", 0.4, 1.0),
    "chunks_random": ("random", "nothing", 0.4, 1.0),
}


def test_the_command_line_and_its_help_name_the_listed_methods() -> None:
    assert get_args(MethodName) == tuple(METHODS)
    assert set(get_args(Selector)) < set(METHODS), "a selector is a method"
    named = options._EXAMPLES.partition("methods, --method")[2].replace(",", " ").split()
    assert set(METHODS) <= set(named)


def test_each_method_has_its_needs_and_its_defaults() -> None:
    found = {}
    for name in get_args(MethodName):
        kind = METHODS[name]
        rule = kind.rule(Method(name))
        found[name] = (rule.selector, kind.needs, rule.keep_fraction, kind.weight)
    assert found == PAPER
    assert [n for n, kind in METHODS.items() if kind.one_vocabulary] == ["kld", "rho1", "rho1_self"]
    assert [n for n, kind in METHODS.items() if kind.every_token] == ["alm"]
    given = METHODS["rho1"].rule(Method("rho1", keep_fraction=0.0, scope="row", seed=3))
    assert given == SelectionRule("full", keep_fraction=0.0, scope="row", seed=3)
    with pytest.raises(ValueError, match=r"keep_fraction must lie in 0\.\.1, got 40"):
        Method(keep_fraction=40)
    with pytest.raises(ValueError, match="--method best: choose of teacher, full, random, "):
        Method("best")  # type: ignore[arg-type]
