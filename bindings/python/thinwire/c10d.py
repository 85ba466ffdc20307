"""The communicator for PyTorch: a dedicated process group of torch.distributed, for one reducer's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._errors import Error, ErrorCode
from ._thinwire import Communicator

__all__ = ["TorchCommunicator"]

_CONNECTION_LOST = ("connection closed", "connection reset", "broken pipe", "connection refused", "remote end closed")


class TorchCommunicator(Communicator):
    """Blocking collectives on host memory, on a process group of its own.

    A group of its own keeps the reducer's thread out of the way of everything else that the program communicates: the
    two orders of collectives have nothing to do with each other. The group lives until ``destroy_process_group()``.

    Args:
        process_group: whose ranks take part; the default group unless given. Every rank of it makes its communicator
            at the same point of the program.
        timeout: longest wait for the other ranks, as timedelta or in seconds; unless given, the backend's own default
            (30 minutes with Gloo).

    Raises:
        Error: invalid_argument if there is no process group or this process is not in it; unsupported if its backend
            does not reach host memory and there is no Gloo; timeout or remote if the ranks do not meet.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None
    ) -> None:
        super().__init__()
        if not dist.is_available() or not dist.is_initialized():
            raise Error(
                ErrorCode.invalid_argument,
                "there is no process group: call torch.distributed.init_process_group() before thinwire",
            )
        parent = dist.group.WORLD if process_group is None else process_group
        self._rank: int = dist.get_rank(parent)
        if self._rank < 0:
            raise Error(ErrorCode.invalid_argument, "this process is not a member of the process group")
        self._size: int = dist.get_world_size(parent)
        self._error: Error | None = None
        self._lists = False  # collectives on lists of tensors, where the backend has no others
        self._group = self._call("the making of its process group", lambda: _new_group(parent, timeout))

    def rank(self) -> int:
        """This rank within the group, 0 … size() - 1."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def all_gather(self, block: Any, blocks: Any) -> None:
        """blocks [size * n] u8 receives every rank's block [n] u8 in rank order."""
        sent, received = torch.from_dlpack(block), torch.from_dlpack(blocks)
        self._call("all_gather", lambda: self._all_gather(sent, received))

    def all_to_all(self, sent: Any, received: Any) -> None:
        """Block r of `sent` [size * n] u8 goes to rank r; block r of `received` came from rank r."""
        source, target = torch.from_dlpack(sent), torch.from_dlpack(received)
        self._call("all_to_all", lambda: dist.all_to_all_single(target, source, group=self._group))

    def all_reduce(self, mine: Any, sum: Any) -> None:
        """sum [n] f32 receives the elementwise sum of all ranks' mine [n] f32; `mine` may be `sum`."""
        source, target = torch.from_dlpack(mine), torch.from_dlpack(sum)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        self._call("all_reduce", lambda: dist.all_reduce(target, group=self._group))

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self._call("barrier", lambda: dist.barrier(group=self._group))

    def abort(self, reason: str) -> None:
        """Makes this communicator dead. Ranks that wait for this one wait until their time-out."""
        if self._error is None:
            self._error = Error(ErrorCode.remote, reason)

    @property
    def dead(self) -> bool:
        """Whether a call has failed, so that all further ones will."""
        return self._error is not None

    def _all_gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        if not self._lists:
            try:
                dist.all_gather_into_tensor(received, sent, group=self._group)
                return
            except RuntimeError as error:  # refused before anything was sent, on every rank alike
                if "support" not in str(error).lower():
                    raise
                self._lists = True
        dist.all_gather(list(received.chunk(self._size)), sent, group=self._group)

    def _call(self, what: str, collective: Callable[[], Any]) -> Any:
        """Runs a collective; its failure becomes one sentence, and the last thing that this communicator did."""
        if self._error is not None:
            raise Error(self._error.code, str(self._error))
        begin = time.monotonic()
        try:
            return collective()
        except Error as error:
            self._error = error
            raise
        except Exception as error:
            self._error = self._explain(what, error, time.monotonic() - begin)
            raise Error(self._error.code, str(self._error)) from error

    def _explain(self, what: str, error: Exception, seconds: float) -> Error:
        me, text = f"rank {self._rank} of {self._size}", str(error).strip()
        lowered = text.lower()
        if isinstance(error, RuntimeError) and ("timed out" in lowered or "timeout" in lowered):
            return Error(
                ErrorCode.timeout,
                f"{me} waited {seconds:.1f} s in {what} for the other ranks, and not all of them came",
            )
        if any(sign in lowered for sign in _CONNECTION_LOST):
            return Error(
                ErrorCode.remote, f"{me} lost the connection to another rank in {what}: that rank has ended or died"
            )
        first_line = text.splitlines()[0] if text else type(error).__name__
        return Error(ErrorCode.system, f"{me}: {what} failed: {first_line}")


def _new_group(parent: dist.ProcessGroup | None, timeout: timedelta | float | None) -> dist.ProcessGroup:
    """A group of the same ranks on the backend that serves the parent's host tensors."""
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise Error(ErrorCode.invalid_argument, f"timeout is {timeout.total_seconds()} s, must be positive")
    config = dist.get_backend_config(parent)  # "cpu:gloo,cuda:nccl" or just "gloo"
    by_device = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    backend = by_device.get("cpu") if by_device else config
    if backend is None or backend == "nccl":  # which reach the memory of devices only
        backend = "gloo"
        if not dist.is_gloo_available():
            raise Error(
                ErrorCode.unsupported,
                f"the process group's backend '{config}' does not reach host memory, and this PyTorch has no Gloo",
            )
    return dist.new_group(
        dist.get_process_group_ranks(parent),
        **({} if timeout is None else {"timeout": timeout}),  # of which older versions take no None
        backend=backend,
        use_local_synchronization=backend != "mpi",  # which MPI does not have
    )
