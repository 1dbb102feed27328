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


def report(*in_front):
    """Return what a process finds that sees these folders before all others."""
    path = os.pathsep.join([*map(str, in_front), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        env=job_environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_installed_megatron_has_all_that_is_used():
    found = report()
    assert found["version"].startswith("0.19.")
    assert found["changes"] == []


@pytest.mark.skipif(NEXT is None, reason="VOCAG_TEST_MEGATRON_NEXT names no checkout")
def test_a_checkout_has_all_that_is_used():
    found = report(NEXT)
    assert Path(found["where"]) == Path(NEXT).resolve()
    assert found["changes"] == []


@pytest.fixture
def names():
    found, changes = upstream_report.resolve_names()
    assert changes == []
    return found


def test_what_is_gone_is_named(names, monkeypatch):
    state = names["parallel_state"]
    monkeypatch.delattr(state, "get_expert_tensor_model_pipeline_parallel_group")
    monkeypatch.delattr(names["training"], "dummy_train_step")
    assert set(upstream_report.changed_parallel_state(names)) == {
        "parallel_state.get_expert_tensor_model_pipeline_parallel_group is gone"
    }
    assert set(upstream_report.changed_objects(names)) == {"training.dummy_train_step is gone"}


def test_a_changed_signature_is_named(names):
    def gather(own, *, process_group=None):
        return own

    changed = {**names, "gather_from_sequence_parallel_region": gather}
    (found,) = set(upstream_report.changed_calls(changed))
    assert found.startswith("gather_from_sequence_parallel_region is called otherwise: got an")
    assert "'group'" in found


def test_a_name_that_moved_is_named(monkeypatch):
    block = sys.modules[upstream_report.resolve_names()[0]["TransformerBlockSubmodules"].__module__]
    monkeypatch.delattr(block, "get_num_layers_to_build")
    _, (changed,) = upstream_report.resolve_names()
    assert "transformer_block.get_num_layers_to_build can't be imported" in changed
