"""A Megatron-LM checkout's own pretrain_gpt.py, with the lines that docs/megatron.md gives.

VOCAG_TEST_MEGATRON_LM: a checkout of version 0.19, whose script is tried in place of ours.
"""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.launch import ROOT, torchrun
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import require_equal, train

pytestmark = pytest.mark.slow

CHECKOUT = os.environ.get("VOCAG_TEST_MEGATRON_LM")


def changed(script):
    """Return a script with the documented lines from where the documentation says to its end."""
    text = (ROOT / "docs/megatron.md").read_text()
    section = text.split("## Your own pretrain_gpt.py\n")[1].split("\n## ")[0]
    (first,) = re.findall(r"from the line `(.+?)` to the end", section)
    (lines,) = re.findall(r"```python\n(.+?)```", section, re.DOTALL)
    assert len(lines.splitlines()) == 3
    kept, found, _ = script.partition(f"    {first}\n")
    assert found, f"no line {first!r}"
    return kept + lines


def test_the_three_lines_train_in_both_worlds(inputs, tmp_path):
    path, job = tmp_path / "pretrain_gpt.py", {}
    environment = {"VOCAG_TEST_SCRIPT": str(path)}
    if CHECKOUT is None:
        script = changed((ROOT / "tests/megatron_plugin/checkout_script.py").read_text())
        # The user's own arguments stay known, to the teacher's ranks, too.
        own = "lambda parser: vocag.add_arguments(add_own_arguments(parser))"
        path.write_text(script.replace("vocag.add_arguments", own))
        job["own_argument"] = "3"
    else:
        path.write_text(changed((Path(CHECKOUT) / "pretrain_gpt.py").read_text()))
        environment["PYTHONPATH"] = f"{ROOT}:{CHECKOUT}"
        job["launch"] = torchrun
    done = train(
        inputs, 2, tmp_path / "dump", environment=environment, vocag_teacher_world_size=1, **job
    )
    require_equal(tmp_path / "dump", inputs, reference_gradients(inputs))
    assert CHECKOUT or re.search(r"own_argument \.+ 3", done.stdout)
