"""Programs on the hosts of a lab, with torchrun's environment, watched until they end."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .network import Lab, LabError

EXIT_TIMEOUT = 124  # as timeout(1)
MASTER_PORT = 29500
GRACE = 3.0  # seconds between SIGTERM and SIGKILL


@dataclass
class Program:
    """What runs on one host. `name` is how messages call it."""

    name: str
    host: int
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def rank_programs(lab: Lab, command: Sequence[str], per_host: int = 1) -> list[Program]:
    """The command once for each rank, as torchrun would start it; ranks of one host have consecutive numbers."""
    require_command(command)
    world_size = per_host * len(lab.hosts)
    programs = []
    for rank in range(world_size):
        host, local_rank = divmod(rank, per_host)
        environment = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": host,
            "GROUP_WORLD_SIZE": len(lab.hosts),
            "NODE_RANK": host,
            "MASTER_ADDR": lab.hosts[0].address,
            "MASTER_PORT": MASTER_PORT,
        }
        programs.append(Program(f"rank {rank}", host, list(command), {k: str(v) for k, v in environment.items()}))
    return programs


def require_command(command: Sequence[str]) -> None:
    """Raises LabError if there is no such program."""
    if not shutil.which(command[0]):
        raise LabError(f"command '{command[0]}' not found")


class Run:
    """Programs that run together: when one fails, all end. What they print is passed through, line by line.

    Args:
        lab: the hosts.
        programs: what to start.
        tag: put the program's name before each line.
    """

    def __init__(self, lab: Lab, programs: Sequence[Program], tag: bool = False) -> None:
        self._lab = lab
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[Program, subprocess.Popen]] = {}  # by number of the program
        for number, program in enumerate(programs):
            process = lab.popen(
                program.host,
                program.command,
                env=environment() | program.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._running[number] = (program, process)
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, number)
            for stream, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                os.set_blocking(stream.fileno(), False)
                prefix = f"[{program.name}] " if tag else ""
                self._selector.register(stream, selectors.EVENT_READ, _Lines(stream, sink, prefix))

    def wait(self, timeout: float | None = None) -> tuple[int, str]:
        """Waits for the end: the exit code, and a sentence if it is not 0.

        The code is that of the first program to fail, 128 + signal for one that was killed, 124 at the time limit.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while self._running:
                failure = self._step(limit)
                if failure:
                    return failure
                if limit is not None and time.monotonic() >= limit:
                    return EXIT_TIMEOUT, f"stopped after {timeout:g} s, the time limit"
            return 0, ""
        finally:
            self._end()

    def _step(self, limit: float | None) -> tuple[int, str] | None:
        """Passes output on and takes note of who has ended; what to return if one has failed."""
        ended = []
        for key, _ in self._selector.select(None if limit is None else max(0.0, limit - time.monotonic())):
            if isinstance(key.data, _Lines):
                if not key.data.pump():
                    self._selector.unregister(key.fileobj)
            else:
                ended.append(key)
        failures = []
        for key in sorted(ended, key=lambda key: key.data):
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
            program, process = self._running.pop(key.data)
            code = process.wait()
            if code:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
                failures.append((128 - code if code < 0 else code, f"{program.name} on host {program.host} {how}"))
        return failures[0] if failures else None

    def _end(self) -> None:
        """Asks those that still run to end, waits a little, and passes on what they still have to say."""
        if self._running:
            self._lab.signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE
            while self._running and time.monotonic() < deadline:
                self._step(deadline)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Lines):
                key.data.pump(last=True)
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()


class _Lines:
    """Passes whole lines from a pipe to a sink, so that those of several ranks do not mix."""

    def __init__(self, stream, sink, prefix: str) -> None:
        self._stream, self._sink, self._prefix = stream, sink.buffer, prefix.encode()
        self._rest = b""

    def pump(self, last: bool = False) -> bool:
        """Passes on what is there; false at the end of the stream."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                piece = os.read(self._stream.fileno(), 65536)
                ended = not piece
                self._rest += piece
                if not last:
                    break
        # A progress bar ends its lines by a carriage return.
        end = len(self._rest) if ended or last else max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1
        if end:
            lines = self._rest[:end].splitlines(keepends=True) if self._prefix else [self._rest[:end]]
            self._rest = self._rest[end:]
            self._sink.write(b"".join(self._prefix + line for line in lines))
            self._sink.flush()
        return not ended


def environment() -> dict[str, str]:
    """What ranks inherit; they share one machine, and find each other on eth0 only."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    return variables | {f"{library}_SOCKET_IFNAME": "eth0" for library in ("GLOO", "NCCL", "TP")}
