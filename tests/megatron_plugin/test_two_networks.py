"""Two nodes, each a network of its own: everything that ranks say passes GLOO_SOCKET_IFNAME."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.forked_ranks import ROOT, job_environment
from tests.megatron_plugin.training_job import TRAINER, arguments

pytestmark = pytest.mark.slow

INTERFACE = "net0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ENDS_WITHIN_SECONDS = 400


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def nodes():
    """Two network namespaces that reach each other through one interface alone."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the program ip")
    names = [f"vocag{os.getpid()}{side}" for side in "ab"]
    if ip("netns", "add", names[0], check=False).returncode:
        pytest.skip("this machine gives no network namespaces")
    with ExitStack() as cleaning:
        cleaning.callback(ip, "netns", "del", names[0])
        ip("netns", "add", names[1])
        cleaning.callback(ip, "netns", "del", names[1])
        peer = ["peer", "name", INTERFACE, "netns", names[1]]
        ip("-n", names[0], "link", "add", INTERFACE, "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", name, "link", "set", interface, "up")
        yield names


def test_both_worlds_meet_over_the_named_interface(inputs, nodes, tmp_path):
    # The student's three replicas lie on both nodes, the teacher on the second.
    sizes = {"train_iters": 2, "global_batch_size": 6, "vocag_teacher_world_size": 1}
    command = ["-m", TRAINER, *arguments(inputs, distributed_timeout_minutes=3, **sizes)]
    environment = job_environment(GLOO_SOCKET_IFNAME=INTERFACE)
    agents = []
    with ExitStack() as opened:
        for rank, (node, address) in enumerate(zip(nodes, ADDRESSES, strict=True)):
            torchrun = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(rank)]
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29533"]
            torchrun += ["--rdzv-conf", f"is_host={1 - rank}", "--local-addr", address]
            log = opened.enter_context((tmp_path / node).open("wb"))
            within = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run"]
            agent = subprocess.Popen(
                [*within, *torchrun, *command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            opened.callback(agent.kill)
            agents.append(agent)
        codes = [agent.wait(ENDS_WITHIN_SECONDS) for agent in agents]
    said = [(tmp_path / node).read_text() for node in nodes]
    assert codes == [0, 0], said[0][-4000:] + said[1][-4000:]
    assert any("iteration        2/       2" in each for each in said)
