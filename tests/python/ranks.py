"""Runs a function on several ranks: forked processes with a Gloo process group, each with a hard limit.

Importing torch takes seconds, forking does not: the parent imports it once, and never computes with it, since threads
do not survive a fork.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import in their first step
import torch.distributed as dist


@dataclass
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: BaseException | None = None  # what the function raised
    trace: str = ""
    status: int | None = None  # exit code, negative for a signal; None: killed at the limit
    seconds: float = 0.0


def free_port() -> int:
    """A port of the loopback device that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(world_size: int, function: Callable[..., Any], *args: Any, limit: float = 120.0) -> list[Any]:
    """function(rank, world_size, *args) on every rank; returns their values, fails with the first traceback."""
    outcomes = observe(world_size, function, *args, limit=limit)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.status != 0:
            raise AssertionError(f"rank {rank} of {world_size}, exit status {outcome.status}:\n{outcome.trace}")
    return [outcome.value for outcome in outcomes]


def observe(world_size: int, function: Callable[..., Any], *args: Any, limit: float = 120.0) -> list[Outcome]:
    """As `run`, but returns what happened, whatever it was. Ranks still there at the limit are killed."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        children = [_fork(Path(folder), rank, world_size, function, args) for rank in range(world_size)]
        outcomes = [Outcome() for _ in children]
        waiting = dict(enumerate(children))
        while waiting and time.monotonic() - begin < limit:
            for rank, pid in list(waiting.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    outcomes[rank].status = os.waitstatus_to_exitcode(status)
                    outcomes[rank].seconds = time.monotonic() - begin
                    del waiting[rank]
            time.sleep(0.02)
        for pid in waiting.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for rank, outcome in enumerate(outcomes):
            result = Path(folder, str(rank))
            if result.exists():
                outcome.value, outcome.error, outcome.trace = pickle.loads(result.read_bytes())
        return outcomes


def same_everywhere(value: object) -> bool:
    """Whether every rank of the default group gives an equal value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def as_threads(communicators: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    """function(communicator) on a thread per rank, without PyTorch's part; their values, or the first exception."""
    results: list[Any] = [None] * len(communicators)

    def body(rank: int) -> None:
        try:
            results[rank] = function(communicators[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(communicators))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _fork(folder: Path, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = (function(rank, world_size, *args), None, "")
        status = 0
    except BaseException as error:
        result = (None, error, traceback.format_exc())
    try:
        # Written in one piece, so that a rank that is killed leaves none.
        partial = Path(folder, f"{rank}.partial")
        try:
            partial.write_bytes(pickle.dumps(result))
        except Exception:  # an exception that cannot be pickled
            partial.write_bytes(pickle.dumps((None, RuntimeError(str(result[1])), result[2])))
        partial.rename(Path(folder, str(rank)))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
