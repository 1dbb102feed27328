"""A Megatron-LM checkout's own pretrain_gpt.py, with the lines that docs/megatron.md gives."""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.launch import ROOT, torchrun
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import require_equal, train

pytestmark = pytest.mark.slow

# To try a real checkout of version 0.19: name its folder here.
CHECKOUT = os.environ.get("VOCAG_TEST_MEGATRON_LM")


def documented_change():
    """Return where the documentation says the lines go, and the lines."""
    text = (ROOT / "docs/megatron.md").read_text()
    section = text.split("## Your own pretrain_gpt.py\n")[1].split("\n## ")[0]
    (first,) = re.findall(r"from the line `(.+?)` to the end", section)
    (lines,) = re.findall(r"```python\n(.+?)```", section, re.DOTALL)
    assert len(lines.splitlines()) == 3
    return first, lines


def changed(script, *, edit=("", "")):
    """Return a script with the documented lines in place of its end."""
    first, lines = documented_change()
    kept, found, _ = script.partition(f"    {first}\n")
    assert found, f"no line {first!r}"
    return kept + lines.replace(*edit)


def test_the_three_lines_train_in_both_worlds(inputs, tmp_path):
    # The user's own arguments stay known, to the teacher's ranks, too.
    own = "lambda parser: vocag.add_arguments(add_own_arguments(parser))"
    script = (ROOT / "tests/megatron_plugin/checkout_script.py").read_text()
    path = tmp_path / "pretrain_gpt.py"
    path.write_text(changed(script, edit=("vocag.add_arguments", own)))
    done = train_with(path, inputs, tmp_path / "dump", own_argument="3")
    assert re.search(r"own_argument \.+ 3", done.stdout)


@pytest.mark.skipif(CHECKOUT is None, reason="VOCAG_TEST_MEGATRON_LM names no checkout")
def test_the_three_lines_fit_the_real_script(inputs, tmp_path):
    path = tmp_path / "pretrain_gpt.py"
    path.write_text(changed((Path(CHECKOUT) / "pretrain_gpt.py").read_text()))
    path_of_checkout = {"PYTHONPATH": f"{ROOT}:{CHECKOUT}"}
    train_with(path, inputs, tmp_path / "dump", environment=path_of_checkout, launch=torchrun)


def train_with(script, inputs, dump, **changes):
    """Run a step of a script; its gradients must be those of one process."""
    environment = {"VOCAG_TEST_SCRIPT": str(script), **changes.pop("environment", {})}
    done = train(inputs, 2, dump, environment=environment, vocag_teacher_world_size=1, **changes)
    require_equal(dump, inputs, reference_gradients(inputs))
    return done
