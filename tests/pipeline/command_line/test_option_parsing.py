"""Command lines from dataclasses: what a field's type, default and docstring line become."""

import re
from argparse import ArgumentParser
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest

from beam_jobs.align.options import AlignOptions
from beam_jobs.score.options import ScoreOptions
from pipeline.command_line.failures import hinted, hints_of
from pipeline.command_line.option_parsing import (
    Option,
    Rest,
    _entries,
    add_options,
    naming_options,
    parse_command,
    parse_options,
    read_options,
)
from pipeline.explore.command import PlanOptions
from pipeline.training.config import TrainConfig
from pipeline.validate.command import ValidateOptions

ALL = (AlignOptions, ScoreOptions, TrainConfig, ValidateOptions, PlanOptions)


@dataclass(frozen=True)
class Blade:
    """What cuts.

    Attributes:
        name: of the blade.
        seed: of the wear.
        teeth: how many.
    """

    name: Annotated[Literal["saw", "axe"], Option(form="itself")] = "saw"
    seed: int = 0
    teeth: int | None = None


def read_side(text: str) -> int | Literal["both"]:
    return "both" if text == "both" else int(text)


@dataclass(frozen=True)
class Cut:
    """Cut wood.

    100 % by hand.

    Attributes:
        wood: what to cut.
        lengths: of the pieces, in m;
            the rest is burnt.
        blade: what cuts.
        seed: of everything.
        marks: where to cut.
        share: of the wood, such as 5 %.
        side: from which; a number or both.
        owner: whose it is (default: nobody's).
        log: what to write.
        dry_run: cut nothing.
        rest: for the saw mill.
    """

    wood: Annotated[str, Option("WOOD", form="positional")]
    lengths: tuple[float, ...] = (1.0, 2.5)
    blade: Blade = field(default_factory=Blade)
    seed: int = 3
    marks: Annotated[tuple[str, ...] | None, Option("MARK", form="repeated")] = None
    share: Annotated[float, Option("SHARE", read=lambda text: int(text) / 100)] = 0.05
    side: Annotated[int | Literal["both"] | None, Option("SIDE", read=read_side)] = None
    owner: Annotated[str, Option(once="two people can't own it")] | None = None
    log: Path | None = None
    dry_run: bool = False
    rest: Rest = ()


def parse(*arguments: str) -> Cut:
    return parse_options(Cut, arguments, prog="cut", epilog="examples:\n  cut oak", groups=GROUPS)


GROUPS = {"wood": "the wood", "blade": "the blade"}


def test_what_is_left_out_has_the_dataclass_default() -> None:
    assert parse("oak") == Cut("oak", blade=Blade(seed=3))


def test_every_form_of_value_is_read() -> None:
    given = parse(
        *("oak", "--lengths", "3", "4", "--blade=axe", "--teeth", "7", "--seed", "9"),
        *("--share=10", "--side=2", "--owner", "me", "--log", "l.txt", "--dry-run"),
        *("--mill_speed", "8", "--mar", "x"),
    )
    assert given == Cut(
        "oak",
        lengths=(3.0, 4.0),
        blade=Blade("axe", 9, 7),
        seed=9,
        share=0.1,
        side=2,
        owner="me",
        log=Path("l.txt"),
        dry_run=True,
        # Neither Beam's underscores nor a shortened name are taken for ours.
        rest=("--mill_speed", "8", "--mar", "x"),
    )


def test_repeated_options() -> None:
    given = parse("oak", "--marks", "a", "--marks=b", "--teeth=1", "--teeth=2")
    assert (given.marks, given.blade.teeth) == (("a", "b"), 2)
    with pytest.raises(ValueError, match="--owner is given twice; two people can't own it"):
        parse("oak", "--owner=a", "--owner=a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: WOOD"),
        (["oak", "--teeth=many"], "argument --teeth: invalid int value: 'many'"),
        (["oak", "--blade=spoon"], "argument --blade: invalid choice: 'spoon'"),
        (["oak", "--log="], "argument --log: it is empty; name a path"),
    ],
)
def test_argparse_says_what_is_wrong_and_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_is_the_docstring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for part in (
        "Cut wood. 100 % by hand. options: -h",
        "the wood: WOOD what to cut",
        "of the pieces, in m; the rest is burnt (default: 1.0 2.5)",
        "the blade: --blade {saw,axe} of the blade (default: saw)",
        "of everything (default: 3)",
        "whose it is (default: nobody's) --log FILE what to write --dry-run cut nothing",
    ):
        assert part in flat
    assert "of the wear" not in flat
    assert "for the saw mill" not in flat
    assert "examples:\n  cut oak\n" in text
    assert max(map(len, text.splitlines())) < 80


def test_help_starts_with_what_is_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_options(TrainConfig, ["--help"], prog="vocag train")
    usage, *others = capsys.readouterr().out.split("\n\n")
    needed = "--data DATASET --student MODEL --output FOLDER --method METHOD"
    assert usage.split() == f"usage: vocag train {needed} [options]".split()
    titles = [title for text in others if (title := text.split("\n")[0]).endswith(":")]
    assert titles[:2] == ["required:", "options:"]
    [required] = [text for text in others if text.startswith("required:")]
    found = re.findall(r"^  (--\S+)", required, re.M)
    assert found == ["--data", "--student", "--output", "--method"]


@pytest.mark.parametrize("kind", ALL)
def test_every_option_is_described(kind: type) -> None:
    entries = list(_entries(kind))
    assert len(entries) >= len(fields(kind)) - 2
    assert [entry.name for entry in entries if not entry.text] == []
    described = re.findall(r"^ {8}(\w+): ", kind.__doc__ or "", re.MULTILINE)
    assert described == [entry.name for entry in fields(kind)]


def test_commands_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    kinds: dict[str, type[Cut | Blade]] = {"cut": Cut, "sharpen": Blade}

    def parse_one(*arguments: str) -> Cut | Blade:
        return parse_command(kinds, arguments, prog="wood", description="Wood.", epilog="more")

    assert parse_one("sharpen", "--name", "axe") == Blade("axe")
    for arguments in ([], ["sharpen", "--nam", "axe"], ["burn"], ["--help"]):
        with pytest.raises(SystemExit) as left:
            parse_one(*arguments)
        assert left.value.code == (0 if arguments == ["--help"] else 2)
    assert re.search(r"sharpen +What cuts\.", capsys.readouterr().out)


@dataclass(frozen=True)
class Shop:
    """Sell blades.

    Attributes:
        seed: of the prices.
        blade: what is sold.
        spare: what is given away.
    """

    seed: int = 1
    blade: Blade = field(default_factory=Blade)
    spare: Annotated[Blade, Option(form="prefix")] = Blade()


def test_options_join_a_parser_that_has_others() -> None:
    parser = ArgumentParser(prog="market", allow_abbrev=False)
    parser.add_argument("--seed")
    add_options(parser, Shop, prefix="shop_", groups={"shop_spare": "gifts"})
    given = [*("--shop-blade=axe", "--shop-seed=4", "--seed=5"), *("--shop-spare=axe",)]
    values = vars(parser.parse_args([*given, "--shop-spare-seed=6", "--shop-spare-teeth=7"]))
    assert values["seed"] == "5"
    read = read_options(Shop, values, prefix="shop_")
    assert read == Shop(4, Blade("axe", 4), Blade("axe", 6, 7))
    assert read_options(Shop, vars(parser.parse_args([])), prefix="shop_") == Shop(1, Blade(seed=1))
    gifts = parser.format_help().partition("gifts:")[2]
    names = ["--shop-spare", "--shop-spare-seed", "--shop-spare-teeth"]
    assert re.findall(r"--[a-z-]+", gifts) == names


@dataclass(frozen=True)
class Fussy:
    """Refuse.

    Attributes:
        seed: even.
        top_k: even, too.
    """

    seed: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.seed % 2:
            raise ValueError(f"seed={self.seed} is odd, as in my/top_k.txt; a seed must be even")
        if self.top_k % 2:
            raise ValueError(f"top_k {self.top_k} is odd")


@dataclass(frozen=True)
class Holder:
    """Hold it.

    Attributes:
        fussy: what is held.
    """

    fussy: Fussy = Fussy()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("seed", "--my-seed 3 is odd, as in my/top_k.txt; a seed must be even"),
        ("top_k", "--my-top-k 3 is odd"),
    ],
)
def test_errors_of_fields_name_the_options_that_were_given(given: str, message: str) -> None:
    values = {"my_seed": 0, "my_top_k": 0, f"my_{given}": 3}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_options(Holder, values, prefix="my_")
    with pytest.raises(ValueError, match=f"^{given}[= ]3 is odd"):
        Fussy(**{given: 3})


def test_a_library_names_fields_and_a_command_its_options() -> None:
    """In messages and hints, of later work, too; a field of the command's own has no prefix."""
    with (
        pytest.raises(ValueError, match=r"^lower --rows or --my-top-k, not x/top_k") as error,
        naming_options(Holder, prefix="my_", others=("rows",)),
    ):
        raise hinted(ValueError("lower rows= or top_k, not x/top_k"), "seed=4 rows=True")
    assert hints_of(error.value) == ["hint: --my-seed 4 --rows"]


def test_what_a_user_wrote_is_no_field() -> None:
    told = 'column "rows=3" of rows=2, where \'seed=3 and "top_k" > 1\': the run\'s own top_k'
    with pytest.raises(ValueError, match=r"^column") as error, naming_options(Holder, prefix="my_"):
        raise hinted(ValueError(told), "seed='seed=1'")
    assert str(error.value) == told.replace("own top_k", "own --my-top-k")
    assert hints_of(error.value) == ["hint: --my-seed 'seed=1'"]


def test_a_flag_that_may_be_left_open_has_a_twin() -> None:
    required = ["--input=a", "--output=b"]
    for given, expected in (([], None), (["--keep-text"], True), (["--no-keep-text"], False)):
        assert parse_options(AlignOptions, [*required, *given], prog="align").keep_text is expected
