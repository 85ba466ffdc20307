"""Gradients of devices for which thinwire has no kernels: by way of host memory, while the backward pass goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future


def needs_staging(tensor: Tensor) -> bool:
    """Whether the reducer cannot read it where it lies."""
    return tensor.device.type != "cpu"


class Staging:
    """Copies of buckets in (pinned) host memory, one for each bucket, on a stream of their own."""

    def __init__(self) -> None:
        self._hosts: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    def to_host(self, index: int, buffer: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A host buffer that `buffer` [n] is being copied to, and what waits until it is there."""
        module, stream = self._stream(buffer.device)
        host = self._hosts.get(index)
        if host is None or host.numel() < buffer.numel() or host.dtype != buffer.dtype:
            host = torch.empty(buffer.numel(), dtype=buffer.dtype, pin_memory=needs_staging(buffer))
            self._hosts[index] = host
        host = host[: buffer.numel()]
        stream.wait_stream(module.current_stream(buffer.device))
        with module.stream(stream):
            host.copy_(buffer, non_blocking=True)
            ready = module.Event()
            ready.record(stream)
        return host, ready.synchronize

    def to_device(self, future: Future[Tensor], host: Tensor, buffer: Tensor) -> None:
        """Sets the future to `buffer` once it holds what `host` does; who waits for the future waits for the copy."""
        module, stream = self._stream(buffer.device)
        with module.stream(stream):
            buffer.copy_(host, non_blocking=True)
            future.set_result(buffer)

    def _stream(self, device: torch.device) -> tuple[Any, Any]:
        module = torch.get_device_module(device)
        stream = self._streams.get(device)
        if stream is None:
            if device.type != "cpu":
                warnings.warn(
                    f"gradients on {device} go through host memory, where thinwire's kernels run in this version",
                    stacklevel=2,
                )
            # The CPU's streams are for show; with them this code runs, and is tested, where there is no device.
            stream = self._streams[device] = module.Stream(device) if device.type != "cpu" else module.Stream()
        return module, stream


def future_for(buffer: Tensor) -> Future[Tensor]:
    """A future that knows the buffer's device, so that waiting for it means what it does for DDP's own."""
    return Future(devices=[buffer.device]) if needs_staging(buffer) else Future()
