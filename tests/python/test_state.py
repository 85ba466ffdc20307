"""Flush, detach and attach again, names, copies."""

import copy
import io
import pickle

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def make(**hyper: float) -> tuple[DistributedDataParallel, torch.optim.SGD]:
    torch.manual_seed(4)
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=20 * models.KB)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, **hyper)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: models.Batches, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        models.loss_of(model, batches()).backward()
        optimizer.step()


def waiting(handle: thinwire.ddp.Handle) -> float:
    return max(float(v.abs().max()) for v in models.state_of(handle)["residual"].values())


def flush(rank: int, world_size: int) -> None:
    model, optimizer = make(momentum=0.9, weight_decay=0.1)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    train(model, optimizer, models.Batches(rank), 10)
    assert waiting(handle) > 0
    expected = {}
    for name, residual in models.state_of(handle)["residual"].items():
        dist.all_reduce(residual)
        expected[name] = residual / world_size
    handle.flush()
    assert waiting(handle) == 0
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    for name, p in model.module.named_parameters():
        torch.testing.assert_close(p.grad.flatten(), expected[name])
    optimizer.step()
    for name, p in model.module.named_parameters():  # the residual, and no decay
        torch.testing.assert_close(p.detach(), before[name] - 0.02 * p.grad)
    train(model, optimizer, models.Batches(rank), 3)
    assert waiting(handle) > 0
    assert handle.step == 13


def test_flush_empties_residuals_into_gradients() -> None:
    ranks.run(3, flush)


def detach(rank: int, world_size: int) -> None:
    model, optimizer = make(**MOMENTUM)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    options = models.METHODS["redsync"]()
    handle = thinwire.ddp.attach(model, options, optimizer)
    batches = models.Batches(rank)
    train(model, optimizer, batches, 5)
    assert optimizer.param_groups[0]["momentum"] == 0
    handle.detach()
    handle.detach()
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == settings
    for call in (handle.stats, handle.state_dict, handle.flush):
        with pytest.raises(thinwire.Error, match="not attached"):
            call()

    # From here on it is plain DDP, with the momentum so far.
    twin, twin_optimizer = make(**MOMENTUM)
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all("momentum_buffer" in twin_optimizer.state[p] for p in twin.parameters())
    same = copy.deepcopy(batches)
    train(model, optimizer, batches, 5)
    train(twin, twin_optimizer, same, 5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)

    assert thinwire.ddp.attach(model, options, optimizer) is handle
    assert handle.step == 0
    train(model, optimizer, batches, 5)
    assert handle.stats().active
    with pytest.raises(thinwire.Error, match="attached already"):
        thinwire.ddp.attach(model, options, optimizer)
    handle.detach()
    # Once more with another time-out, so with another communicator.
    thinwire.ddp.attach(model, options, optimizer, timeout=30)
    train(model, optimizer, batches, 2)
    assert len({*_gather(models.checksum(list(model.parameters())))}) == 1


def _gather(value: int) -> list[int]:
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def test_detach_gives_back_and_attach_takes_again() -> None:
    ranks.run(2, detach)


def detach_in_density_one(rank: int, world_size: int) -> float:
    """Ten steps of three kinds: plain, attached, plain. All in all as if always plain."""
    results = []
    for attached in (False, True):
        model, optimizer = make(**MOMENTUM)
        batches = models.Batches(rank)
        train(model, optimizer, batches, 10)
        handle = thinwire.ddp.attach(model, thinwire.dense(), optimizer) if attached else None
        train(model, optimizer, batches, 10)
        if handle:
            handle.detach()
        train(model, optimizer, batches, 10)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return float((results[1] - results[0]).norm() / results[0].norm())


def test_momentum_survives_attach_and_detach() -> None:
    assert max(ranks.run(2, detach_in_density_one)) < 1e-6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 32, bias=False)
        self.decoder = nn.Linear(32, 32, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.decoder(self.encoder(x))).sum(1, keepdim=True)


def names(rank: int, world_size: int) -> None:
    options = models.METHODS["top_k"]()
    model = DistributedDataParallel(Tied())
    state = thinwire.ddp.HookState(options, model.named_parameters())
    model.register_comm_hook(state, thinwire.ddp.hook)
    models.loss_of(model, models.Batches(rank)()).backward()
    assert set(models.state_of(state)["residual"]) == {"encoder.weight"}
    assert "sparse" in state.report()

    compiled = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4))
    assert "0._orig_mod.weight" in dict(compiled.named_parameters())
    wrapped = torch.compile(DistributedDataParallel(compiled), backend="eager")
    handle = thinwire.ddp.attach(wrapped, options)
    assert set(models.state_of(handle)["residual"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_names_are_plain_and_tied_parameters_have_one() -> None:
    ranks.run(2, names)


def copies(rank: int, world_size: int) -> None:
    model, optimizer = make()
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    for twin in (copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        with pytest.raises(thinwire.Error, match="not attached"):
            twin.stats()
    file = io.BytesIO()
    torch.save(model, file)
    train(model, optimizer, models.Batches(rank), 2)
    assert handle.stats().active


def test_copies_of_a_model_leave_the_handle_alone() -> None:
    ranks.run(2, copies)
