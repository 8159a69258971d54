"""Where the processes of a run meet before JAX starts, and how each learns that another has gone.

Process 0 serves a `Hub` on the port after JAX's; every process, 0 too, keeps one TCP connection to it, a `Member`. An
operating system closes the connections of a process that is killed, so all hear of it at once; a host that vanishes is
noticed by its silence. Both ends live outside of the processes that run JAX (`taco_jax.launch.supervisor`): XLA
aborts those when the coordinator goes, without a word about who it was.

Messages are lines of JSON. To the hub: {"hello": process, "processes", "host", "pid", "settings"}, {"stage": one of
STAGES}, {"ended": exit code, "how": words, "own": it said itself why, "killed": a signal ended it}, {"ping"}. From it:
{"go"}, {"stop": the line to end with}, {"ping"}.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any

from taco_jax.config import cli
from taco_jax.launch.launchers import Launch

# What a process has reached between the rendezvous and training.
STAGES = ("started", "joined", "ready")
# Reports of one cause arrive within this time: the first to arrive need not be the cause.
SETTLE_SECONDS = 1.0
PINGS = 4  # in the time after which silence counts as death
MAX_LINE = 1 << 16  # bytes; a hello with all settings has a few thousand
MAX_READS = 16  # of 64 KiB from one connection before the others have their turn
MAX_STRANGERS = 128  # connections without a hello; beyond the processes that are still to come
HELLO_SECONDS = 10.0
MAX_NAME = 100  # characters of a host's name in a message
MAX_WARNINGS = 5
ADVICE = "its own output says more; the same command goes on from the last checkpoint"


class Line:
    """One end of a connection: JSON objects, one a line, never blocking. garbled: it has sent what is none."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.socket, self.open, self.begun = connection, True, time.monotonic()
        self.heard, self.garbled = self.begun, False
        self._received, self._sent = b"", 0.0

    def send(self, **message: Any) -> None:
        try:
            # Short messages: they fit the kernel's buffer, or nobody has read it for long.
            self.socket.sendall(json.dumps(message).encode() + b"\n")
            self._sent = time.monotonic()
        except OSError:
            pass  # the reading side notices

    def keep_alive(self, silence: float) -> None:
        if time.monotonic() - self._sent > silence / PINGS:
            self.send(ping=1)

    def receive(self) -> list[dict[str, Any]]:
        """Returns what has arrived; `open` is false from then on when the other end is closed, or sends too long a
        line."""
        try:
            for _ in range(MAX_READS):
                if not (data := self.socket.recv(1 << 16)):
                    self.open = False
                    break
                self._received += data
                self.heard = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._received = self._received.split(b"\n")
        if max(map(len, (*lines, self._received))) > MAX_LINE:
            self.open, lines, self._received = False, [], b""
        messages = [_parse(line) for line in lines]
        self.garbled = self.garbled or None in messages
        return [message for message in messages if message is not None]

    def close(self) -> None:
        self.open = False
        self.socket.close()


class Hub(threading.Thread):
    """The rendezvous of all processes of a launch. Ends when all have ended, or after it has told them why to stop."""

    def __init__(self, launch: Launch, timeout: float, silence: float):
        super().__init__(daemon=True, name="taco_jax rendezvous")
        self.launch, self.timeout, self.silence = launch, timeout, silence
        self._strangers: list[Line] = []
        self._members: dict[int, _Peer] = {}
        self._refused: list[str] = []  # why newcomers were
        self._deadline, self._going = time.monotonic() + timeout, False
        self._end: dict[str, Any] | None = None
        self._settled: float | None = None
        self._selector = selectors.DefaultSelector()
        self._server = _listen(launch.host, launch.port + 1)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)

    def run(self) -> None:
        while not self._over():
            self._selector.select(min(0.5, self.silence / PINGS))
            self._accept()
            for peer in self._members.values():
                for message in peer.line.receive():
                    peer.take(message)
                self._watch(peer)
            self._decide()
        for line in [*self._strangers, *(peer.line for peer in self._members.values())]:
            line.close()
        self._server.close()
        self._selector.close()

    def _over(self) -> bool:
        if self._end is not None:
            return all(not p.line.open or p.ended is not None for p in self._members.values()) or self._past(10.0)
        return self._going and all(p.ended == 0 for p in self._members.values())

    def _past(self, seconds: float) -> bool:
        return self._settled is not None and time.monotonic() > self._settled + seconds

    def _accept(self) -> None:
        most = MAX_STRANGERS + self.launch.processes - len(self._members)
        try:
            for _ in range(most):
                line = Line(self._server.accept()[0])
                self._selector.register(line.socket, selectors.EVENT_READ)
                self._strangers.append(line)
        except OSError:  # nobody else is there
            pass
        for line in list(self._strangers):
            messages = line.receive()
            if messages and not line.garbled:
                self._strangers.remove(line)
                self._welcome(line, messages)
            elif not line.open or line.garbled or time.monotonic() > line.begun + HELLO_SECONDS:
                self._strangers.remove(line)
                self._forget(line)
        while len(self._strangers) > most:
            self._forget(self._strangers.pop(0))

    def _welcome(self, line: Line, messages: list[dict[str, Any]]) -> None:
        hello, count = messages[0], self.launch.processes
        if not _is_hello(hello):
            self._forget(line)  # not one of ours
            return
        process = hello["hello"]
        peer = _Peer(line, f"process {process} of {count} (host {hello['host']}, pid {hello['pid']})", hello)
        other, first = self._members.get(process), self._members.get(0)
        rule = "every process needs its own number and the same count"
        if hello["processes"] != count or not 0 <= process < count:
            self._refuse(peer, f"{peer.name} says that there are {hello['processes']}; {rule}")
        elif other is not None:
            self._refuse(peer, f"{peer.name} and {other.name} have the same number; {rule}")
        elif process == 0 and hello["pid"] != os.getpid():
            self._refuse(peer, f"{peer.name} is not the one that serves this port; {rule}")
        elif first is not None and (why := peer.differs(first)):
            self._refuse(peer, why)
        else:
            self._members[process] = peer
            for message in messages[1:]:
                peer.take(message)
            if process == 0:
                self._compare_with(peer)

    def _compare_with(self, first: _Peer) -> None:
        """Refuses those who came before process 0 with other settings than its."""
        for process, peer in list(self._members.items()):
            if why := peer.differs(first):
                del self._members[process]
                self._refuse(peer, why)

    def _refuse(self, peer: _Peer, why: str) -> None:
        """Tells a newcomer, and nobody else: it may be no process of this run."""
        if len(self._refused) < MAX_WARNINGS:
            self._refused.append(why)
            cli.say(f"warning: refused at {self.launch.host}:{self.launch.port + 1}: {why}", sys.stderr)
        peer.line.send(stop=why)
        self._forget(peer.line)

    def _watch(self, peer: _Peer) -> None:
        if not peer.line.open:
            self._forget(peer.line)
            if peer.ended is None:
                peer.fail(0, "is gone: it was killed, or its host is down")
        elif peer.ended is None and time.monotonic() - peer.line.heard > self.silence:
            peer.fail(0, f"has been silent for {self.silence:.0f} s (heartbeat_timeout): its host or network is down")
        else:
            peer.line.keep_alive(self.silence)

    def _forget(self, line: Line) -> None:
        if line.socket.fileno() >= 0:
            self._selector.unregister(line.socket)
            line.close()

    def _decide(self) -> None:
        """Starts the processes when all are there, and stops them for the first cause that is known for a while."""
        if self._end is not None:
            return
        failed = sorted((p.failure, process) for process, p in self._members.items() if p.failure)
        if failed:
            if self._settled is None:
                self._settled = time.monotonic()
            elif self._past(SETTLE_SECONDS):
                (_, _, how), process = failed[0]
                self._say_stop(f"{self._members[process].name} {how}; {ADVICE}")
            return
        missing = sorted(set(range(self.launch.processes)) - set(self._members))
        if not self._going and not missing:
            self._going, self._deadline = True, time.monotonic() + self.timeout
            for peer in self._members.values():
                peer.line.send(go=1)
        elif time.monotonic() > self._deadline:
            if missing:
                self._say_stop(self._who_is_missing(missing))
            elif late := self._late():
                self._say_stop(late)

    def _who_is_missing(self, missing: list[int]) -> str:
        there = ", ".join(f"{p} on {self._members[p].hello.get('host')}" for p in sorted(self._members))
        return (
            f"{_processes(missing)} of {self.launch.processes} did not report to {self.launch.host}:"
            f"{self.launch.port + 1} within {self.timeout:.0f} s (distributed_timeout); {there} did; "
            + (f"refused was: {self._refused[0]}; " if self._refused else "")
            + f"look whether {'it runs' if len(missing) == 1 else 'they run'} and can reach that address"
        )

    def _late(self) -> str | None:
        """The line about a start that does not get on; None when all are through."""
        stages = {process: p.stage for process, p in self._members.items() if p.ended is None}
        least = min(stages.values(), default=len(STAGES) - 1)
        if least == len(STAGES) - 1:
            return None
        behind = [process for process, stage in stages.items() if stage == least]
        within = f"within {self.timeout:.0f} s (distributed_timeout)"
        if least == 0:
            return f"{_processes(behind)} did not join JAX's processes {within}; {ADVICE}"
        who = "all processes" if len(behind) == len(stages) else _processes(behind)
        return (
            f"start-up self-test: {who} did not get through an all-reduce over all devices {within}; look at the "
            f"network between the hosts (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME)"
        )

    def _say_stop(self, line: str) -> None:
        self._end, self._settled = {"stop": line}, time.monotonic()
        for peer in self._members.values():
            peer.line.send(**self._end)


class _Peer:
    """The hub's knowledge of a process."""

    def __init__(self, line: Line, name: str, hello: dict[str, Any]):
        self.line, self.name, self.hello = line, name, hello
        self.stage, self.ended = 0, None
        self.failure: tuple[int, float, str] | None = None  # rank (0: nobody else's fault), when, how

    def take(self, message: dict[str, Any]) -> None:
        if message.get("stage") in STAGES:
            self.stage = STAGES.index(message["stage"])
        if type(message.get("ended")) is int:
            self.ended = message["ended"]
            if self.ended:
                how = message.get("how")
                # An abort and an exception are what a process ends with when its peer has gone.
                rank = 1 if message.get("own") else 0 if message.get("killed") else 2
                self.fail(rank, how if isinstance(how, str) else "stopped")

    def fail(self, rank: int, how: str) -> None:
        if self.failure is None:
            self.failure = (rank, time.monotonic(), how)

    def differs(self, first: _Peer) -> str | None:
        mine, others = self.hello["settings"], first.hello["settings"]
        for key in others:
            if mine.get(key) != others[key]:
                return (
                    f"{key}: {self.name} has {_shown(mine.get(key))}, process 0 {_shown(others[key])}; give all "
                    f"processes the same settings"
                )
        return None


class Member(Line):
    """A process' connection to the hub. Raises TimeoutError, with a line that names the address, if there is none."""

    def __init__(self, launch: Launch, timeout: float, silence: float, settings: dict[str, Any]):
        deadline, why = time.monotonic() + timeout, ""
        while True:
            try:
                super().__init__(socket.create_connection((launch.host, launch.port + 1), timeout=min(5.0, timeout)))
                break
            except OSError as error:  # not up yet, or not known to the name service yet
                why = error.strerror or str(error)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process 0 of {launch.processes} cannot be reached at {launch.host}:{launch.port + 1} within "
                    f"{timeout:.0f} s (distributed_timeout): {why}; look whether it runs and whether this host "
                    f"({socket.gethostname()}) can connect to that address"
                )
            time.sleep(min(0.25, timeout / 10))
        self.silence = silence
        self.send(
            hello=launch.process,
            processes=launch.processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            settings=settings,
        )

    def poll(self, seconds: float) -> list[dict[str, Any]]:
        """The messages of the next `seconds`, sooner when one arrives."""
        if self.open:
            with selectors.DefaultSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                selector.select(seconds)
            self.keep_alive(self.silence)
            return [m for m in self.receive() if isinstance(m.get("stop", ""), str)]
        time.sleep(seconds)
        return []

    @property
    def silent(self) -> bool:
        """The hub's host has vanished."""
        return time.monotonic() - self.heard > self.silence


def _listen(host: str, port: int) -> socket.socket:
    """Listens on the coordinator's address alone where this machine has it, else on all of its addresses.

    A machine may know its own name as a loopback address (/etc/hosts) that the others do not, and a coordinator behind
    a service's or a router's address has another one itself: both need all addresses.
    """
    for family, _, _, _, address in _own_addresses(host):
        try:
            return socket.create_server((address[0], port), family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)


def _own_addresses(host: str) -> list[tuple]:
    """Returns what a host's name means, as of getaddrinfo; nothing where that cannot be what others know it by."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    is_loopback = lambda text: ipaddress.ip_address(text.partition("%")[0]).is_loopback
    named = host.lower() == "localhost" or any(entry[4][0] == host for entry in found)
    return [entry for entry in found if named or not is_loopback(entry[4][0])]


def _processes(numbers: list[int]) -> str:
    """process 2; processes 1, 5 and 7; many are cut."""
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    shown = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"processes {shown}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "what is nested too deeply"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _is_hello(message: dict[str, Any]) -> bool:
    """Returns whether a message is a hello with values of the right types. (True is an int to isinstance.)"""
    kinds = {"hello": int, "processes": int, "host": str, "pid": int, "settings": dict}
    if any(type(message.get(key)) is not kind for key, kind in kinds.items()):
        return False
    small = all(abs(message[key]) < 1 << 32 for key, kind in kinds.items() if kind is int)
    return small and message["host"].isprintable() and len(message["host"]) <= MAX_NAME
