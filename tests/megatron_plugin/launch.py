"""Start torchrun jobs for tests and return what they said.

VOCAG_TEST_MEGATRON_NEXT: a checkout of Megatron-LM, whose Megatron the jobs' ranks run.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(num_ranks, module, *command, timeout=600, check=True, **environment):
    """Run a job on `num_ranks` processes of this machine; `fork_ranks` says what is given."""
    done = subprocess.run(
        torchrun_command(num_ranks, module, *command),
        cwd=ROOT,
        env=job_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return require_success(done) if check else done


def require_success(done):
    """Return a finished job that went well; show what another one said."""
    if done.returncode:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        raise AssertionError(f"job failed ({done.returncode}):\n{said}")
    return done


def torchrun_command(num_ranks, module, *command):
    """Return the command line of a job."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(num_ranks), "-m", module, *map(str, command)]


def job_environment(**changes):
    """Return the environment of a job: one thread per process, this checkout importable."""
    path = os.pathsep.join(filter(None, [os.environ.get("VOCAG_TEST_MEGATRON_NEXT"), str(ROOT)]))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own, **changes}
