import multiprocessing.managers
import sys

import pytest


@pytest.fixture(autouse=True)
def own_proxies(monkeypatch):
    """Undo what Beam's import does to every process that then can't save: it replaces AutoProxy.

    Python's own, which Python 3.12 needs no replacement for, can't be pickled under another's name.
    """
    if beam := sys.modules.get("apache_beam.utils.multi_process_shared"):
        monkeypatch.setattr(multiprocessing.managers, "AutoProxy", beam.autoproxy)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """What all jobs read; whoever changes it copies it first."""
    pytest.importorskip("megatron.core")
    from tests.megatron_plugin.training_job import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))
