"""thinwire in Accelerate: the same as a script by hand, bit for bit, and checkpoints of every rank's state."""

import importlib
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import models
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
example = importlib.import_module("accelerate_fashion_mnist")
ACCUMULATE = 2


def connect(rank: int, world_size: int) -> None:
    """Accelerate finds the ranks that are there already, as under torchrun, and nothing of an earlier Accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: the process group exists


class Training:
    """What a user writes, on batches of this rank's own."""

    def __init__(self, rank: int, world_size: int) -> None:
        connect(rank, world_size)
        torch.manual_seed(1)
        self.network = models.Mlp()
        optimizer = optimizer_of(self.network)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            self.network, optimizer, schedule_of(optimizer)
        )
        self.handle = thinwire.ddp.attach(self.model, models.METHODS["top_k"](), self.optimizer)
        assert optimizer.param_groups[0]["momentum"] == 0  # taken over through Accelerate's wrapper

        file = f"thinwire_{rank}.pt"
        self.accelerator.register_save_state_pre_hook(
            lambda _models, _weights, to: torch.save(self.handle.state_dict(), f"{to}/{file}")
        )
        self.accelerator.register_load_state_pre_hook(
            lambda _models, at: self.handle.load_state_dict(torch.load(f"{at}/{file}", weights_only=True))
        )

    def run(self, batches: list) -> int:
        """Trains on the batches; returns the checksum of the parameters."""
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(models.loss_of(self.model, batch))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return models.checksum(list(self.network.parameters()))


def optimizer_of(network: nn.Module) -> torch.optim.SGD:
    """With all that thinwire takes over."""
    return torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Every step has another rate."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def batches_of(rank: int, steps: int) -> list:
    """For that many steps, with accumulation."""
    batches = models.Batches(rank)
    return [batches() for _ in range(steps * ACCUMULATE)]


def by_hand(rank: int, world_size: int, steps: int) -> int:
    """What Accelerate does, written out. It steps a schedule once for every rank."""
    torch.manual_seed(1)
    network = models.Mlp()
    model = DistributedDataParallel(network)
    optimizer = optimizer_of(network)
    schedule = schedule_of(optimizer)
    thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    for i, batch in enumerate(batches_of(rank, steps), 1):
        is_last = i % ACCUMULATE == 0
        with nullcontext() if is_last else model.no_sync():
            (models.loss_of(model, batch) / ACCUMULATE).backward()
        if is_last:
            optimizer.step()
            for _ in range(world_size):
                schedule.step()
            optimizer.zero_grad()
    return models.checksum(list(network.parameters()))


def accumulated(rank: int, world_size: int) -> int:
    warnings.filterwarnings("error", message=".*thinwire.*")
    training = Training(rank, world_size)
    result = training.run(batches_of(rank, 8))
    stats = training.handle.stats()
    assert stats.active and stats.step == 7
    assert result == by_hand(rank, world_size, 8)
    return result


def test_the_same_as_by_hand() -> None:
    assert len(set(ranks.run(2, accumulated))) == 1


def checkpoints(rank: int, world_size: int, folder: Path) -> None:
    batches = batches_of(rank, 8)
    half = len(batches) // 2
    first = Training(rank, world_size)
    first.run(batches[:half])
    first.accelerator.save_state(folder / "whole")
    straight = first.run(batches[half:])

    torch.distributed.barrier()
    resumed = Training(rank, world_size)
    resumed.accelerator.load_state(folder / "whole")
    assert resumed.run(batches[half:]) == straight
    assert resumed.handle.step == 7

    # What is registered for checkpointing is saved by rank 0 alone.
    resumed.accelerator.register_for_checkpointing(resumed.handle)
    resumed.accelerator.save_state(folder / "of rank 0")
    torch.distributed.barrier()
    if rank == 1:
        with pytest.raises(thinwire.Error, match="rank 1 of 2 was given the state of rank 0 of 2"):
            resumed.accelerator.load_state(folder / "of rank 0")


def test_checkpoints(tmp_path: Path) -> None:
    ranks.run(2, checkpoints, tmp_path)


def example_run(rank: int, world_size: int, *arguments: str) -> tuple[float, int, str]:
    connect(rank, world_size)
    _, model, handle, accuracy = example.train(example.parse_arguments(arguments))
    return accuracy, models.checksum(list(model.parameters())), handle.report()


def test_example(tmp_path: Path) -> None:
    first, second = ranks.run(2, example_run, "--steps", "150", "--save", str(tmp_path))
    assert first[:2] == second[:2] and first[0] > 70
    assert "step 149: sparse, 201 of 200704 elements" in first[2]

    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(ranks.free_port())]
    script = [str(EXAMPLES / "accelerate_fashion_mnist.py"), "--steps", "5", "--resume", str(tmp_path)]
    done = subprocess.run([sys.executable, *torchrun, *script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (accuracy,) = (line for line in done.stdout.splitlines() if line.startswith("test accuracy"))
    assert float(accuracy.split()[2]) > 70
    assert "step 154: sparse, 201 of 200704 elements" in done.stdout
