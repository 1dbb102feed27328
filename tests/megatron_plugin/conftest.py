import pytest


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """What all jobs read; whoever changes it copies it first."""
    pytest.importorskip("megatron.core")
    from tests.megatron_plugin.training_job import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))
