"""Hosts on one machine: network namespaces with an address each, joined by a switch.

Processes of different hosts share the disk, as if all mounted one, and reach each other over the
network alone; a host whose cable is pulled computes on, and nobody hears of it.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace, joined by a cable to the switch's namespace."""

    name: str
    address: str
    cable: str
    switch: str

    def command(self, *arguments: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}", *arguments]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Put this thread on the host, and with it the processes that it starts meanwhile."""
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.name}") as there:
            os.setns(there.fileno(), os.CLONE_NEWNET)
            try:
                yield
            finally:
                os.setns(here.fileno(), os.CLONE_NEWNET)

    def cut_off(self) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.cable, "down")

    def accepts(self, port: int) -> bool:
        """Return whether something listens there, asked from the host itself."""
        listening = _run(*self.command("ss", "-Htln", f"sport = :{port}"))
        return bool(listening.strip())


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Sequence[Host]]:
    """Make hosts; skip the test where this process may not, and say why."""
    for program in ("ip", "nsenter", "ss"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here: install iproute2 and util-linux")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    stem = f"vocag{os.getpid()}n{next(_NUMBERS)}"
    switch = f"{stem}s"
    with contextlib.ExitStack() as stack:
        try:
            _add(stack, switch)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        yield [_join(stack, stem, switch, number) for number in range(1, num_hosts + 1)]


def _join(stack: contextlib.ExitStack, stem: str, switch: str, number: int) -> Host:
    host = Host(f"{stem}h{number}", f"10.213.0.{number}", f"port{number}", switch)
    _add(stack, host.name)
    cable = ("link", "add", host.cable, "type", "veth", "peer", "eth0", "netns", host.name)
    _run("ip", "-n", switch, *cable)
    _run("ip", "-n", switch, "link", "set", host.cable, "master", "switch", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", host.name, "link", "set", device, "up")
    return host


def _add(stack: contextlib.ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout
