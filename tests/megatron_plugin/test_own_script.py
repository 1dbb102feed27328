"""A Megatron-LM checkout's own pretrain_gpt.py, with the lines that docs/guides/megatron.md gives.

VOCAG_TEST_MEGATRON_NEXT: a checkout, whose script is tried in place of ours.
"""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.forked_ranks import ROOT
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import require_equal, train

pytestmark = pytest.mark.slow

OURS = ROOT / "tests/megatron_plugin/checkout_script.py"


def changed(script):
    """Return a script with the documented lines from where the documentation says to its end."""
    text = (ROOT / "docs/guides/megatron.md").read_text()
    section = text.split("## Your own pretrain_gpt.py\n")[1].split("\n## ")[0]
    (first,) = re.findall(r"from the line `(.+?)` to the end", section)
    (lines,) = re.findall(r"```python\n(.+?)```", section, re.DOTALL)
    assert len(lines.splitlines()) == 3
    kept, found, _ = script.partition(f"    {first}\n")
    assert found, f"no line {first!r}"
    return kept + lines


def test_the_three_lines_train_in_both_worlds(inputs, tmp_path):
    checkout = os.environ.get("VOCAG_TEST_MEGATRON_NEXT")
    original = Path(checkout, "pretrain_gpt.py") if checkout else OURS
    # The user's own arguments stay known, to the teacher's ranks, too.
    own = "lambda parser: plugin.add_arguments(add_own_arguments(parser))"
    script = changed(original.read_text())
    path = tmp_path / "pretrain_gpt.py"
    path.write_text(script if checkout else script.replace("plugin.add_arguments", own))
    options = {} if checkout else {"own_argument": "3"}
    environment = {"VOCAG_TEST_SCRIPT": str(path)}
    done = train(
        inputs, 2, tmp_path, environment=environment, vocag_teacher_world_size=1, **options
    )
    require_equal(tmp_path, inputs, reference_gradients(inputs))
    assert checkout or re.search(r"own_argument \.+ 3", done.stdout)
