"""A hub of processes that meet, with members as they join."""

import socket

from helpers import until

from taco_jax.launch.launchers import Launch
from taco_jax.launch.rendezvous import Hub, Member


def free_port() -> int:
    """The first of two neighbouring ports that are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue


class Meeting:
    """A hub, and members as they join."""

    def __init__(self, processes: int, timeout: float = 120.0, silence: float = 120.0):
        self.processes, self.port, self.silence = processes, free_port(), silence
        self.hub = Hub(self.launch(0), timeout, silence)
        self.hub.start()
        self.members: dict[int, Member] = {}

    def launch(self, process: int) -> Launch:
        return Launch("test", "127.0.0.1", self.port, process, self.processes)

    def join(self, *processes: int, settings=None) -> None:
        for process in processes:
            self.members[process] = Member(self.launch(process), 120.0, self.silence, settings or {"steps": 1})

    def hears(self, process: int, key: str) -> str | None:
        """The next message with `key` that a process gets."""
        heard = []

        def told():
            heard.extend(message[key] for message in self.members[process].poll(0.1) if key in message)
            return heard

        until(told, f"process {process} to hear a {key!r}", seconds=120)
        return heard[0]

    def start(self) -> None:
        self.join(*range(self.processes))
        assert all(self.hears(process, "go") for process in self.members)

    def end(self) -> None:
        for member in self.members.values():
            member.close()
        self.ends()

    def ends(self) -> None:
        self.hub.join(timeout=120)
        assert not self.hub.is_alive(), "limit of 120 s: waited for the hub to end"
