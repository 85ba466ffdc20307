"""Single cases from the life of DDP users: unused parameters, overflow, two models, groups of ranks, one
method after the other. Uneven inputs: test_reported_cases.py."""

import copy

import models
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


def unused(rank: int, world_size: int) -> None:
    """A parameter that no rank uses in a step keeps residual, velocity and value; one that some rank uses does not.

    pytorch#28294, #28883: DDP drops the mean of a parameter that no rank used, and with it what residuals gave for it.
    """
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
    before, value = models.state_of(handle), model.module.branches[2].weight.detach().clone()
    step(rank % 2)  # 0 and 1
    after = models.state_of(handle)
    for what in ("residual", "velocity"):
        for name in before[what]:
            always_dense = before[what][name].numel() < model_limit
            untouched = name.startswith(("branches.2", "never")) or (what == "residual" and always_dense)
            assert torch.equal(before[what][name], after[what][name]) == untouched, (what, name)
    assert torch.equal(model.module.branches[2].weight, value)
    assert model.module.branches[2].weight.grad is None
    assert ranks.same_everywhere(models.checksum(list(model.parameters())))


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
        assert all(v.isfinite().all() for v in models.state_of(handle)["residual"].values())


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
    assert all(ranks.same_everywhere(models.checksum(list(model.parameters()))) for model in both)


def test_two_models_in_one_backward_pass() -> None:
    ranks.run(3, two_models)


def two_groups(rank: int, world_size: int) -> None:
    """Two models at once, each on two ranks of four, with another method and another number of steps."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    model = DistributedDataParallel(models.GivenGradients((20, 20)), process_group=groups[mine])
    handle = thinwire.ddp.attach(model, models.METHODS["top_k" if mine else "dragonn"]())
    sums = torch.zeros(20, 20)
    steps = 30 + 10 * mine
    for _ in range(steps):
        model.zero_grad()
        model(torch.arange(400.0).view(20, 20) * (rank + 1)).backward()
        sums += model.module.w0.grad
    handle.flush()
    sums += model.module.w0.grad
    mean = (1.5, 3.5)[mine]
    torch.testing.assert_close(sums, torch.arange(400.0).view(20, 20) * mean * steps)
    assert handle.step == steps


def test_two_models_on_two_groups_of_ranks() -> None:
    ranks.run(4, two_groups)


def some_ranks(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    model = DistributedDataParallel(models.Mlp(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer)
    batches = models.Batches(rank)
    for _ in range(5):
        optimizer.zero_grad()
        models.loss_of(model, batches()).backward()
        optimizer.step()
    assert set(handle.state_dict()) == {f"rank_{rank // 2}_of_2"}
    sums = [0, 0]
    dist.all_gather_object(sums, models.checksum(list(model.parameters())), group=group)
    assert sums[0] == sums[1]


def test_a_model_on_some_of_the_ranks() -> None:
    ranks.run(3, some_ranks)


def replaced(rank: int, world_size: int) -> None:
    """One method after the other, with plain DDP between them; what each leaves behind is flushed."""
    model = DistributedDataParallel(models.GivenGradients((20, 20), (6,)))
    generator = torch.Generator().manual_seed(rank)
    given, received = torch.zeros(406), torch.zeros(406)

    def add(total: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        total += torch.cat([t.flatten() for t in tensors])

    for method in ("top_k", None, "dragonn", "redsync", None, "dgc"):
        handle = thinwire.ddp.attach(model, models.METHODS[method]()) if method else None
        for _ in range(4):
            model.zero_grad()
            gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            model(*gradients).backward()
            add(given, gradients)
            add(received, [p.grad for p in model.parameters()])
        if handle:
            assert handle.stats().active
            handle.flush()
            add(received, [p.grad for p in model.parameters()])
            handle.detach()
    dist.all_reduce(given)
    torch.testing.assert_close(received * world_size, given, rtol=1e-5, atol=1e-5)


def test_methods_replaced_in_mid_training_lose_nothing() -> None:
    ranks.run(2, replaced)


def branches(rank: int, world_size: int) -> None:
    """Each rank goes its own way through the model, and sometimes the other's."""
    network = models.Branches()
    model = DistributedDataParallel(network, find_unused_parameters=True, bucket_cap_mb=8 * models.KB)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"]())
    local = copy.deepcopy(network)
    batches = models.Batches(rank)
    names = [name for name, _ in network.named_parameters()]
    given, received = ({name: torch.zeros(p.shape) for name, p in network.named_parameters()} for _ in range(2))
    for step in range(20):
        model.zero_grad()
        local.zero_grad()
        batch, branch = batches(), (rank if step % 3 else 2 - rank)
        models.loss_of(model, batch, branch).backward()
        models.loss_of(local, batch, branch).backward()
        for name, p, q in zip(names, network.parameters(), local.parameters(), strict=True):
            given[name] += 0 if q.grad is None else q.grad
            received[name] += 0 if p.grad is None else p.grad * world_size
    residual = models.state_of(handle)["residual"]
    for name in names:
        dist.all_reduce(residual[name])
        dist.all_reduce(given[name])
        total = received[name] + residual[name].view(given[name].shape)
        torch.testing.assert_close(total, given[name], rtol=1e-5, atol=1e-6)


def test_branches_that_differ_from_rank_to_rank() -> None:
    ranks.run(3, branches)
