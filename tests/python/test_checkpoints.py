"""Checkpoints: a resumed run is the run that was not interrupted, other numbers of ranks, DCP, what is refused."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

RANKS = 3
SAVED_AT = 13  # inside of a ramp, and between two searches of ThresholdSearch
STEPS = 22


def with_options(method: str, **changes: Any) -> Callable[[], thinwire.ReducerOptions]:
    def make() -> thinwire.ReducerOptions:
        options = models.METHODS[method]() if method in models.METHODS else thinwire.dense()
        for name, value in changes.items():
            setattr(options, name, value)
        return options

    return make


@dataclass
class Case:
    """One way to train."""

    options: Callable[[], thinwire.ReducerOptions]
    ddp: dict[str, Any]
    adam: bool = False
    passes: int = 1  # backward passes of a step, all but the last under no_sync
    warm_up: int = 0  # backward passes before a checkpoint is loaded


RAMP = thinwire.Schedule(dense_steps=4, ramp_steps=16, ramp_stages=4)
CASES = {
    "redsync": Case(with_options("redsync"), {}),
    "dragonn, find_unused": Case(with_options("dragonn"), {"find_unused_parameters": True}),
    "quantized, bucket_view": Case(with_options("redsync_quantized"), {"gradient_as_bucket_view": True}),
    "reused threshold, static_graph": Case(with_options("threshold_search"), {"static_graph": True}, adam=True),
    "reused threshold, no_sync": Case(with_options("threshold_search"), {}, passes=2),
    "ramp": Case(with_options("dgc", schedule=RAMP), {}),
    "ramp, adam": Case(with_options("redsync", schedule=RAMP), {}, adam=True),
    "whole buckets, find_unused": Case(with_options("top_k"), {"find_unused_parameters": True}),
    "whole buckets, warm-up": Case(with_options("top_k"), {}, warm_up=1),
    "whole buckets, static_graph, warm-up": Case(with_options("top_k"), {"static_graph": True}, warm_up=2),
    "dense, warm-up": Case(with_options("dense"), {}, warm_up=1),
    "clipped, warm-up": Case(with_options("redsync", clip_norm=0.05), {}, warm_up=1),
}


class Run:
    """A model in training on one rank."""

    def __init__(self, rank: int, case: Case, saved: dict | None = None) -> None:
        torch.manual_seed(4)
        finds_unused = "find_unused_parameters" in case.ddp
        self.case, self.network = case, models.Branches() if finds_unused else models.Mlp()
        self.model = DistributedDataParallel(self.network, bucket_cap_mb=8 * models.KB, **case.ddp)
        if case.adam:
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        else:
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
            )
        self.batches, self.step = models.Batches(rank), 0
        if saved is not None:
            self._load_model(saved)
        self.handle = thinwire.ddp.attach(self.model, case.options(), self.optimizer)
        if saved is not None:
            self.handle.load_state_dict(saved["thinwire"])

    def _load_model(self, saved: dict) -> None:
        for _ in range(self.case.warm_up):
            self.model(torch.zeros(4, models.FEATURES)).sum().backward()
        self.optimizer.zero_grad()
        self.network.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])  # which says that momentum has been taken from it
        for _ in range(saved["step"] * self.case.passes):
            self.batches()
        self.step = saved["step"]

    def train(self, until: int) -> float:
        loss = torch.zeros(())
        for self.step in range(self.step + 1, until + 1):
            self.optimizer.zero_grad()
            for passes in range(self.case.passes, 0, -1):
                branch = (self.step % 3,) if isinstance(self.network, models.Branches) else ()
                with self.model.no_sync() if passes > 1 else nullcontext():
                    loss = models.loss_of(self.model, self.batches(), *branch)
                    loss.backward()
            self.optimizer.step()
        return float(loss)

    def save(self, path: Path) -> None:
        state = {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "thinwire": self.handle.state_dict(),
            "step": self.step,
        }
        torch.save(state, path)

    def checksum(self) -> int:
        state = models.state_of(self.handle)
        tensors = [*self.network.parameters(), *(t for s in state["sections"] for t in state[s].values())]
        return models.checksum(tensors)


def file_of(folder: Path, rank: int, case: str = "") -> Path:
    return folder / f"{case}.{rank}.pt"


def uninterrupted(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """Checksums of parameters and state by case, with a checkpoint of each on the way."""
    result = {}
    for name, case in CASES.items():
        run = Run(rank, case)
        run.train(SAVED_AT)
        run.save(file_of(folder, rank, name))
        run.train(STEPS)
        result[name] = run.checksum()
    return result


def resumed(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """The same, from the checkpoints on."""
    result = {}
    for name, case in CASES.items():
        run = Run(rank, case, torch.load(file_of(folder, rank, name), weights_only=True))
        assert run.handle.step == SAVED_AT
        run.train(STEPS)
        assert run.handle.stats().active == (name != "dense, warm-up")
        result[name] = run.checksum()
    return result


@pytest.fixture(scope="module")
def checksums(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list]:
    folder = tmp_path_factory.mktemp("resume")
    return ranks.run(RANKS, uninterrupted, folder), ranks.run(RANKS, resumed, folder)


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(checksums: tuple[list, list], case: str) -> None:
    expected, got = ([rank[case] for rank in each] for each in checksums)
    assert got == expected
    assert len(set(got)) == RANKS  # the residuals differ between ranks
