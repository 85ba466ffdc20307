"""Many steps in every mode of DDP: no hang, the replicas stay the same bits, memory and threads stay as they are.

THINWIRE_SOAK_STEPS=5000 pytest tests/python/test_soak.py is the long run, of about ten minutes on two cores.
"""

import os
import threading
from contextlib import nullcontext
from pathlib import Path

import models
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

STEPS = int(os.environ.get("THINWIRE_SOAK_STEPS", "300"))
RANKS = 4
BUCKETS = 8


class Deep(nn.Module):
    """[b, 32] -> [b, 1] through eight layers of 2 000 to 4 000 weights, of which a branch uses all or all but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.FEATURES if i == 0 else 64, 64) for i in range(BUCKETS))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i != left_out:
                x = layer(x).relu()
        return self.head(x)


MODES = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "no_sync": {},
    "mixed_dtypes": {},
    "join": {},
}


def resident_kilobytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def soak(rank: int, world_size: int, mode: str) -> tuple[int, int, int]:
    """Checksum of the replica, buckets of the last step, growth of memory over the last two thirds in kB."""
    torch.manual_seed(1)
    network = models.MixedMlp() if mode == "mixed_dtypes" else Deep()
    model = DistributedDataParallel(network, bucket_cap_mb=8 * models.KB, **MODES[mode])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer)
    batches = models.Batches(rank, 4)
    threads, early = 0, 0
    steps = STEPS - rank * STEPS // 20 if mode == "join" else STEPS
    with Join([model]) if mode == "join" else nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            if mode == "no_sync":
                with model.no_sync():
                    models.loss_of(model, batches()).backward()
            arguments = ((step + rank) % (BUCKETS - 1) + 1,) if mode == "find_unused" else ()
            models.loss_of(model, batches(), *arguments).backward()
            optimizer.step()
            if step == steps // 3:
                threads, early = threading.active_count(), resident_kilobytes()
    growth = resident_kilobytes() - early
    assert threading.active_count() == threads
    assert handle.step == STEPS - 1
    return models.checksum(list(network.parameters())), handle.stats().jobs, growth


@pytest.mark.parametrize("mode", MODES)
def test_soak(mode: str) -> None:
    outcomes = ranks.run(RANKS, soak, mode, limit=60 + STEPS)
    if mode != "join":  # there the last rank alone goes on, and Join copies its replica to the others at the end
        assert len({checksum for checksum, _, _ in outcomes}) == 1
    for _, jobs, growth in outcomes:
        assert jobs >= (2 if mode == "mixed_dtypes" else BUCKETS)
        assert growth < 8 * 1024
