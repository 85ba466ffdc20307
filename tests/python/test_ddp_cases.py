"""Single cases from the life of DDP users: unused parameters, overflow, two models, uneven inputs."""

import models
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


def same_everywhere(model: nn.Module) -> bool:
    sums = [0] * dist.get_world_size()
    dist.all_gather_object(sums, models.checksum(list(model.parameters())))
    return len(set(sums)) == 1


def unused(rank: int, world_size: int) -> None:
    """A parameter that no rank uses in a step keeps residual, velocity and value; one that some rank uses does not."""
    model = DistributedDataParallel(models.Branches(), find_unused_parameters=True, bucket_cap_mb=8 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer)
    model_limit = handle.options.dense_below
    batches = models.Batches(rank)

    def step(branch: int) -> None:
        optimizer.zero_grad()
        models.loss_of(model, batches(), branch).backward()
        optimizer.step()

    for branch in (0, 1, 2):
        step(branch)
    before, value = handle.state_dict(), model.module.branches[2].weight.detach().clone()
    step(rank % 2)  # 0 and 1
    after = handle.state_dict()
    for what in ("residual", "velocity"):
        for name in before[what]:
            always_dense = before[what][name].numel() < model_limit
            untouched = name.startswith(("branches.2", "never")) or (what == "residual" and always_dense)
            assert torch.equal(before[what][name], after[what][name]) == untouched, (what, name)
    assert torch.equal(model.module.branches[2].weight, value)
    assert model.module.branches[2].weight.grad is None
    assert same_everywhere(model)


def test_unused_parameters() -> None:
    ranks.run(3, unused)


def overflow(rank: int, world_size: int) -> None:
    """One rank's gradient is not finite: every rank sees NaN in that step, and finite numbers in the next."""
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"]())
    batches = models.Batches(rank)
    for step in range(8):
        model.zero_grad()
        x, y = batches()
        if step == 5 and rank == 1:
            x[0, 0] = torch.inf
        models.loss_of(model, (x, y)).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert bool(grads.isfinite().all()) == (step != 5)
        assert handle.stats().non_finite == (step == 5)
        assert all(v.isfinite().all() for v in handle.state_dict()["residual"].values())


def test_overflow_on_one_rank() -> None:
    ranks.run(2, overflow)


def two_models(rank: int, world_size: int) -> None:
    """Both reduce in one backward pass."""
    both = [DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB) for _ in range(2)]
    handles = [thinwire.ddp.attach(model, models.METHODS["dragonn"]()) for model in both]
    optimizer = torch.optim.SGD([p for model in both for p in model.parameters()], lr=0.02)
    batches = models.Batches(rank)
    for _ in range(30):
        optimizer.zero_grad()
        batch = batches()
        sum(models.loss_of(model, batch) for model in both).backward()
        optimizer.step()
    assert all(handle.stats().step == 29 for handle in handles)
    assert all(same_everywhere(model) for model in both)


def test_two_models_in_one_backward_pass() -> None:
    ranks.run(3, two_models)


def uneven(rank: int, world_size: int) -> None:
    """Under Join a rank that has finished shadows the others."""
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    batches = models.Batches(rank)
    with Join([model]):
        for _ in range(10 + 5 * rank):
            optimizer.zero_grad()
            models.loss_of(model, batches()).backward()
            optimizer.step()
    dist.barrier()


def test_uneven_inputs() -> None:
    ranks.run(3, uneven)


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
        assert same_everywhere(model)
        results.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    return float((results[1] - results[0]).norm() / results[0].norm())


def test_half_precision_parameters() -> None:
    difference = ranks.run(2, half)[0]
    assert 0 < difference < 5e-3  # both round parameters to 8 or 11 bits, at different points
