"""Parameters of every kind: dtypes, dimensions, no elements, order in memory."""

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


class Half(nn.Module):
    """f16 and bf16 weights beside f32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, 64).half()
        self.middle = nn.Linear(64, 64).bfloat16()
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.half()).relu().bfloat16()
        return self.head(self.middle(hidden).relu().float())


def half(rank: int, world_size: int) -> float:
    """Dense, with everything that is taken over, against plain DDP."""
    results = []
    for attached in (False, True):
        torch.manual_seed(5)
        model = DistributedDataParallel(Half())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01)
        if attached:
            thinwire.ddp.attach(model, thinwire.dense(), optimizer)
        batches = models.Batches(rank)
        for _ in range(20):
            optimizer.zero_grad()
            models.loss_of(model, batches()).backward()
            optimizer.step()
        assert ranks.same_everywhere(models.checksum(list(model.parameters())))
        results.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    return float((results[1] - results[0]).norm() / results[0].norm())


def test_half_precision_parameters() -> None:
    difference = ranks.run(2, half)[0]
    assert 0 < difference < 5e-3  # both round parameters to 8 or 11 bits, at different points


SHAPES = ((), (7,), (16, 20), (0, 3), (8, 8, 5), (4, 4, 4, 5), (2, 3, 4, 5, 3), (0,), (1, 1))


def shapes(rank: int, world_size: int, bucket_cap: float) -> None:
    """Integer gradients: sums are exact."""
    model = DistributedDataParallel(models.GivenGradients(*SHAPES), bucket_cap_mb=bucket_cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    handle = thinwire.ddp.attach(model, models.METHODS["dgc"](), optimizer)
    for step in range(5):
        optimizer.zero_grad()
        model(*(torch.full(shape, float(8 * (i + rank + step))) for i, shape in enumerate(SHAPES))).backward()
        optimizer.step()
    assert handle.stats().active
    saved = handle.state_dict()
    handle.load_state_dict(saved)
    handle.flush()
    optimizer.step()
    handle.detach()
    assert ranks.same_everywhere(models.checksum(list(model.parameters())))
    assert {name: v.numel() for name, v in next(iter(saved.values()))["residual"].items()} == {
        name: p.numel() for name, p in model.module.named_parameters()
    }
    # Parameters that are always dense: plain momentum SGD on the mean.
    for i, p in enumerate(model.parameters()):
        if p.numel() >= 256:
            continue
        theta = u = 0.0
        for step in range(5):
            u = 0.5 * u + 8 * (i + step + (world_size - 1) / 2)
            theta -= u
        assert torch.equal(p.detach(), torch.full(p.shape, theta)), i


@pytest.mark.parametrize("bucket_cap", [25.0, models.KB / 1024], ids=["one bucket", "a bucket each"])
def test_parameters_of_any_number_of_dimensions_and_of_no_elements(bucket_cap: float) -> None:
    ranks.run(2, shapes, bucket_cap)


def swapped(rank: int, world_size: int) -> list[list[torch.dtype]]:
    """Buckets of two dtypes, whose order is another one after the rebuild."""
    dtypes = (torch.float32, torch.bfloat16)
    model = DistributedDataParallel(models.GivenGradients((16, 16), (16, 16), (20, 20), (20, 20), dtypes=dtypes))
    state = thinwire.ddp.HookState(models.METHODS["redsync"](), model.named_parameters())
    orders: list[list[torch.dtype]] = []

    def hook(state: thinwire.ddp.HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            orders.append([])
        orders[-1].append(bucket.buffer().dtype)
        return thinwire.ddp.hook(state, bucket)

    model.register_comm_hook(state, hook)
    given = [torch.zeros(p.shape) for p in model.parameters()]
    received = [torch.zeros(p.shape) for p in model.parameters()]
    for _ in range(6):
        model.zero_grad()
        values = [torch.arange(p.numel()).view(p.shape) % 97 + 100.0 * i for i, p in enumerate(model.parameters())]
        model(*(v * (rank + 1) for v in values)).backward()
        for p, v, g, r in zip(model.parameters(), values, given, received, strict=True):
            g += v * (rank + 1)
            r += p.grad.float() * world_size
    residual = models.state_of(state)["residual"]
    for (name, p), g, r in zip(model.module.named_parameters(), given, received, strict=True):
        waiting = residual[name].view(p.shape)
        dist.all_reduce(waiting)
        dist.all_reduce(g)
        torch.testing.assert_close(r + waiting, g, rtol=1e-6 if p.dtype == torch.float32 else 1e-2, atol=1e-2)
    return orders


def test_buckets_of_two_dtypes_that_swap_at_the_rebuild() -> None:
    for orders in ranks.run(2, swapped):
        assert orders[0] == orders[1][::-1]
        assert all(order == orders[1] for order in orders[2:])
        assert len(orders[0]) == 2


class ConvNet(nn.Module):
    """channels_last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh().mean((2, 3)))


def channels_last(rank: int, world_size: int, is_dense: bool) -> None:
    """With all that is taken over, against plain DDP; the optimizer's buffers come and go on the way."""
    results = []
    for attached in (False, True):
        torch.manual_seed(5)
        model = DistributedDataParallel(ConvNet().to(memory_format=torch.channels_last))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
        options = thinwire.dense() if is_dense else models.sparse(thinwire.top_k(1.0))
        options.momentum_masking = False
        generator = torch.Generator().manual_seed(rank)
        handle = None
        for step in range(15):
            if attached and step == 5:
                handle = thinwire.ddp.attach(model, options, optimizer)
            if handle and step == 10:
                assert handle.stats().active == (not is_dense)
                handle.detach()
            optimizer.zero_grad()
            x = torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
            model(x).square().mean().backward()
            optimizer.step()
        assert model.module.second.weight.is_contiguous(memory_format=torch.channels_last)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float((results[1] - results[0]).norm() / results[0].norm()) <= 1e-6


@pytest.mark.parametrize("is_dense", [True, False])
def test_channels_last(is_dense: bool) -> None:
    ranks.run(2, channels_last, is_dense)
