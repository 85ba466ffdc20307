"""Every mode of DDP, from the first step on: the replicas stay the same bits, the loss goes down, and from step 3 on a
bucket costs one communicator call."""

from contextlib import nullcontext

import models
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

STEPS = 200
MODES = {
    "plain": (models.Mlp, {}),
    "bucket_view": (models.Mlp, {"gradient_as_bucket_view": True}),
    "static_graph": (models.Mlp, {"static_graph": True}),
    "find_unused": (models.Branches, {"find_unused_parameters": True}),
    "no_sync": (models.Mlp, {}),
    "mixed_dtypes": (models.MixedMlp, {}),
}


def train(rank: int, world_size: int, mode: str, method: str) -> dict:
    torch.manual_seed(1)
    make, arguments = MODES[mode]
    network: nn.Module = make()
    model = DistributedDataParallel(network, bucket_cap_mb=20 * models.KB, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS[method](), optimizer)
    batches = models.Batches(rank)
    losses, stats = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for passes in range(2 if mode == "no_sync" else 1, 0, -1):
            with model.no_sync() if passes > 1 else nullcontext():
                # Of three branches two are in use in a step by two ranks or more, and each of them in most steps.
                branch = ((step + rank % 2) % 3,) if mode == "find_unused" else ()
                loss = models.loss_of(model, batches(), *branch)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stats.append(handle.stats())
    if mode == "find_unused":
        assert all(p.grad is None for p in network.never.parameters())
    return {
        "parameters": models.checksum(list(network.parameters())),
        "losses": losses,
        "jobs": [s.jobs for s in stats],
        "calls": [s.calls for s in stats],
        "active": [s.active for s in stats],
        "step": handle.step,
    }


def all_modes(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict:
    return {case: train(rank, world_size, *case) for case in cases}


CASES = {
    2: [(mode, method) for mode in MODES for method in ("redsync", "dragonn")],
    3: [(mode, method) for mode, method in zip(MODES, ["dragonn_a", "top_k", "redsync"] * 2, strict=True)],
}


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest) -> list[dict]:
    return ranks.run(request.param, all_modes, CASES[request.param], limit=300)


@pytest.mark.parametrize("mode", MODES)
def test_mode(trained: list[dict], mode: str) -> None:
    for case in [case for case in trained[0] if case[0] == mode]:
        results = [of_rank[case] for of_rank in trained]
        assert len({r["parameters"] for r in results}) == 1, case
        for r in results:
            assert r["step"] == STEPS - 1
            assert all(r["active"])
            assert r["calls"][3:] == r["jobs"][3:]
            assert r["jobs"][-1] > 1
        if mode in ("plain", "bucket_view", "no_sync"):
            assert results[0]["jobs"][0] != results[0]["jobs"][1]  # rebuilt after the first step
        first, last = (sum(sum(r["losses"][part]) for r in results) for part in (slice(20), slice(-20, None)))
        assert last < 0.6 * first, case
