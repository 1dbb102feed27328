"""Whether Megatron still has what the plugin takes of it: the installed one, and a checkout.

VOCAG_TEST_MEGATRON_NEXT: a checkout of Megatron-LM of any version. The test fails where something
has changed, and names it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin import upstream_report
from tests.megatron_plugin.launch import ROOT, job_environment

SCRIPT = ROOT / "tests/megatron_plugin/upstream_report.py"
NEXT = os.environ.get("VOCAG_TEST_MEGATRON_NEXT")


def test_the_installed_megatron_has_all_that_is_used():
    assert upstream_report.all_changes() == []


@pytest.mark.skipif(NEXT is None, reason="VOCAG_TEST_MEGATRON_NEXT names no checkout")
def test_a_checkout_has_all_that_is_used():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        env=job_environment(),  # the checkout comes first
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["where"]) == Path(NEXT).resolve()
    assert found["changes"] == []


def test_what_has_changed_is_named(monkeypatch):
    def gather(own, *, process_group=None):
        return own

    names, _ = upstream_report.resolve_names()
    block = sys.modules[names["TransformerBlockSubmodules"].__module__]
    mappings = sys.modules[names["gather_from_sequence_parallel_region"].__module__]
    monkeypatch.delattr(names["parallel_state"], "get_context_parallel_rank")
    monkeypatch.delattr(names["training"], "get_forward_backward_func")
    monkeypatch.delattr(block, "get_num_layers_to_build")
    monkeypatch.setattr(mappings, "gather_from_sequence_parallel_region", gather)
    called, moved, state, replaced = upstream_report.all_changes()
    assert called.startswith("gather_from_sequence_parallel_region is called otherwise: got an")
    assert "'group'" in called
    assert "transformer_block.get_num_layers_to_build can't be imported" in moved
    assert state == "parallel_state.get_context_parallel_rank is gone"
    assert replaced == "training.get_forward_backward_func is gone"
