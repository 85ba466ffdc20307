"""Local clipping under DDP: each rank's own gradient, over all buckets, before anything is sent."""

import models
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

STEPS = 6
LIMIT = 0.05  # below the norm of most gradients here


def make(bucket_cap: float) -> DistributedDataParallel:
    torch.manual_seed(2)
    return DistributedDataParallel(models.Mlp(), bucket_cap_mb=bucket_cap)


def clipped_means(rank: int, world_size: int) -> tuple[float, list[float], list[float], int]:
    """The largest difference to clipping by hand, the factors, the seconds held, and the number of buckets."""
    model, by_hand = make(8 * models.KB), make(8 * models.KB).module
    options = thinwire.dense()
    options.clip_norm = LIMIT
    handle = thinwire.ddp.attach(model, options)
    batches = models.Batches(rank)
    worst, factors, held, jobs = 0.0, [], [], 0
    for _ in range(STEPS):
        model.zero_grad()
        by_hand.zero_grad()
        batch = batches()
        models.loss_of(model, batch).backward()
        models.loss_of(by_hand, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), LIMIT * world_size**0.5)
        stats = handle.stats()
        factors.append(stats.clip_factor)
        held.append(stats.clip_wait_seconds)
        jobs = max(jobs, stats.jobs)
        assert abs(stats.clip_factor - min(1.0, LIMIT * world_size**0.5 / norm.item())) < 1e-4
        for p, q in zip(model.module.parameters(), by_hand.parameters(), strict=True):
            dist.all_reduce(q.grad)
            worst = max(worst, float((p.grad - q.grad / world_size).abs().max()))
    return worst, factors, held, jobs


def test_a_rank_clips_its_own_gradient_over_all_buckets() -> None:
    for worst, factors, held, jobs in ranks.run(3, clipped_means):
        assert worst < 1e-6
        assert min(factors) < 1.0
        assert all(seconds > 0 for seconds in held)
        assert jobs > 1


def flushed(rank: int, world_size: int) -> float:
    model = make(8 * models.KB)
    options = models.METHODS["top_k"]()
    options.clip_norm = LIMIT
    handle = thinwire.ddp.attach(model, options)
    batches = models.Batches(rank)
    for _ in range(STEPS):
        models.loss_of(model, batches()).backward()
    handle.flush()
    left = max(float(v.abs().max()) for v in models.state_of(handle)["residual"].values())
    models.loss_of(model, batches()).backward()
    return left


def test_a_flush_is_not_held_back() -> None:
    assert ranks.run(2, flushed) == [0.0, 0.0]
