"""Nothing is lost between the backward passes and the means, per parameter: what was given out, times the number of
ranks, plus what waits in the residuals of all ranks, is what came in."""

import copy
from contextlib import nullcontext

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp
from thinwire._layout import shaped

STEPS = 40


class ConvNet(nn.Module):
    """Weights that do not lie in memory in their logical order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(40, 64).t())
        self.head = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 8, 2, 2).repeat(1, 1, 3, 3)
        pooled = self.conv(image).relu().flatten(1)[:, :64]
        return self.head(pooled @ self.transposed)


MODES = {
    "plain": (models.Mlp, {}),
    "bucket_view": (models.Mlp, {"gradient_as_bucket_view": True}),
    "static_graph": (models.Mlp, {"static_graph": True}),
    "find_unused": (models.Branches, {"find_unused_parameters": True}),
    "no_sync": (models.Mlp, {}),
    "memory order": (ConvNet, {}),
}
CASES = [(mode, method) for mode, method in zip(MODES, ["top_k", "dragonn", "redsync"] * 2, strict=True)]
CASES += [("plain", "dragonn_a"), ("find_unused", "dragonn"), ("plain", "redsync_quantized"), ("plain", "dgc")]


def balance(rank: int, world_size: int, mode: str, method: str) -> dict[str, tuple[float, float]]:
    """By parameter: the largest imbalance of an element, and the largest input."""
    torch.manual_seed(2)
    make, arguments = MODES[mode]
    network = make()
    local = copy.deepcopy(network)  # the same gradients without DDP
    model = DistributedDataParallel(network, bucket_cap_mb=8 * models.KB, **arguments)
    handle = thinwire.ddp.attach(model, models.METHODS[method]())
    batches = models.Batches(rank)
    given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in network.named_parameters()}
    received = copy.deepcopy(given)
    for step in range(STEPS):
        model.zero_grad()
        local.zero_grad()
        for passes in range(2 if mode == "no_sync" else 1, 0, -1):
            branch = ((step // 4 + rank % 2) % 3,) if mode == "find_unused" else ()
            batch = batches()
            models.loss_of(local, batch, *branch).backward()
            with model.no_sync() if passes > 1 else nullcontext():
                models.loss_of(model, batch, *branch).backward()
        for (name, p), q in zip(network.named_parameters(), local.parameters(), strict=True):
            if q.grad is not None:
                given[name] += q.grad
            if p.grad is not None:
                received[name] += p.grad
    assert handle.stats().active
    residual = models.state_of(handle)["residual"]
    result = {}
    for name, p in network.named_parameters():
        waiting = shaped(residual[name], p).double()
        dist.all_reduce(waiting)
        dist.all_reduce(given[name])
        imbalance = received[name] * world_size + waiting - given[name]
        result[name] = (float(imbalance.abs().max()), float(given[name].abs().max()))
    return result


def all_cases(rank: int, world_size: int) -> dict:
    return {case: balance(rank, world_size, *case) for case in CASES}


@pytest.fixture(scope="module")
def balances() -> dict:
    return ranks.run(3, all_cases)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_balance(balances: dict, case: tuple[str, str]) -> None:
    for name, (imbalance, largest) in balances[case].items():
        assert imbalance <= 3e-6 * max(largest, 1e-3), name
        assert (largest == 0) == name.startswith("never")
