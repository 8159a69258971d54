"""Where the processes of a run meet before JAX starts, and how each learns that another has gone.

Process 0 serves a `Hub` on the port after JAX's; every process, 0 too, keeps one TCP connection to it, a `Member`. An
operating system closes the connections of a process that is killed, so all hear of it at once; a host that vanishes is
noticed by its silence. Both ends live outside of the processes that run JAX (`taco_jax.supervisor`): XLA aborts those
when the coordinator goes, without a word about who it was.

Messages are lines of JSON. To the hub: {"hello": process, "processes", "host", "pid", "settings"}, {"stage": one of
STAGES}, {"ended": exit code, "how": words, "own": it said itself why, "killed": a signal ended it}, {"ping"}. From it:
{"go"}, {"stop": the line to end with}, {"ping"}.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from typing import Any

from taco_jax.launchers import Launch

# What a process has reached between the rendezvous and training.
STAGES = ("started", "joined", "ready")
# Reports of one cause arrive within this time: the first to arrive need not be the cause.
SETTLE_SECONDS = 1.0
PINGS = 4  # in the time after which silence counts as death
ADVICE = "its own output says more; the same command goes on from the last checkpoint"


class Line:
    """One end of a connection: JSON objects, one a line, never blocking."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.socket, self.open, self.heard = connection, True, time.monotonic()
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
        """What has arrived; `open` is false from then on when the other end is closed."""
        try:
            while data := self.socket.recv(1 << 16):
                self._received += data
                self.heard = time.monotonic()
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._received = self._received.split(b"\n")
        return [message for line in lines if (message := _parse(line)) is not None]

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
        self._deadline, self._going = time.monotonic() + timeout, False
        self._end: dict[str, Any] | None = None
        self._settled: float | None = None
        self._selector = selectors.DefaultSelector()
        self._server = _listen(launch.port + 1)
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
        try:
            line = Line(self._server.accept()[0])
            self._selector.register(line.socket, selectors.EVENT_READ)
            self._strangers.append(line)
        except OSError:
            pass
        for line in list(self._strangers):
            messages = line.receive()
            if messages:
                self._strangers.remove(line)
                self._welcome(line, messages)
            elif not line.open:
                self._strangers.remove(line)
                self._forget(line)

    def _welcome(self, line: Line, messages: list[dict[str, Any]]) -> None:
        hello = messages[0]
        process, count = hello.get("hello"), self.launch.processes
        if not isinstance(process, int):
            self._forget(line)  # not one of ours
            return
        peer = _Peer(line, f"process {process} of {count} (host {hello.get('host')}, pid {hello.get('pid')})", hello)
        if process in self._members or hello.get("processes") != count or not 0 <= process < count:
            other = self._members.get(process)
            says = f"{peer.name} says that there are {hello.get('processes')}" if other is None else f"{peer.name} "
            twice = f"and {other.name} have the same number" if other else ""
            self._say_stop(f"{says}{twice}; every process needs its own number and the same count")
            line.send(**self._end)
            return
        self._members[process] = peer
        for message in messages[1:]:
            peer.take(message)

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
            odd = next((text for p in self._members.values() if (text := p.differs(self._members[0]))), None)
            if odd:
                self._say_stop(odd)
                return
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
            f"{self.launch.port + 1} within {self.timeout:.0f} s (distributed_timeout); {there} did; look whether "
            f"{'it runs' if len(missing) == 1 else 'they run'} and can reach that address"
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
    """What the hub knows of a process."""

    def __init__(self, line: Line, name: str, hello: dict[str, Any]):
        self.line, self.name, self.hello = line, name, hello
        self.stage, self.ended = 0, None
        self.failure: tuple[int, float, str] | None = None  # rank (0: nobody else's fault), when, how

    def take(self, message: dict[str, Any]) -> None:
        if message.get("stage") in STAGES:
            self.stage = STAGES.index(message["stage"])
        if "ended" in message:
            self.ended = message["ended"]
            if self.ended:
                # An abort and an exception are what a process ends with when its peer has gone.
                self.fail(1 if message.get("own") else 0 if message.get("killed") else 2, message.get("how", "stopped"))

    def fail(self, rank: int, how: str) -> None:
        if self.failure is None:
            self.failure = (rank, time.monotonic(), how)

    def differs(self, first: _Peer) -> str | None:
        mine, others = self.hello.get("settings") or {}, first.hello.get("settings") or {}
        for key in others:
            if mine.get(key) != others[key]:
                return (
                    f"{key}: {self.name} has {mine.get(key)!r}, process 0 {others[key]!r}; give all processes the same "
                    f"settings"
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
            return self.receive()
        time.sleep(seconds)
        return []

    @property
    def silent(self) -> bool:
        """The hub's host has vanished."""
        return time.monotonic() - self.heard > self.silence


def _listen(port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)


def _processes(numbers: list[int]) -> str:
    """process 2; processes 1, 5 and 7; many are cut."""
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    shown = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"processes {shown}"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
