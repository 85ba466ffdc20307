"""Where nothing is left out, training with thinwire is training without: a dense step, and density 1 without masking,
equal plain DDP for every optimizer whose momentum is taken over or left alone."""

from collections.abc import Callable

import models
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire.ddp

STEPS = 100


def sgd(**common: float) -> Callable[[nn.Module], Optimizer]:
    """SGD with different hyper-parameters for weights and biases."""

    def make(network: nn.Module) -> Optimizer:
        weights = [p for p in network.parameters() if p.ndim > 1]
        biases = [p for p in network.parameters() if p.ndim <= 1]
        second = {k: v * 0.5 if k in ("momentum", "weight_decay") else v for k, v in common.items()}
        return torch.optim.SGD([{"params": weights}, {"params": biases, **second, "lr": 0.03}], lr=0.02, **common)

    return make


def adamw(network: nn.Module) -> Optimizer:
    weights, biases = list(network.parameters())[::2], list(network.parameters())[1::2]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 2e-3}], lr=1e-3)


def one_group_has_momentum(network: nn.Module) -> Optimizer:
    first, *rest = network.parameters()
    groups = [{"params": [first], "momentum": 0.9}, {"params": rest, "weight_decay": 0.05}]
    return torch.optim.SGD(groups, lr=0.02)


OPTIMIZERS = {
    "sgd": sgd(),
    "decay": sgd(weight_decay=0.05),
    "momentum": sgd(momentum=0.9),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "momentum, decay": sgd(momentum=0.9, weight_decay=0.05),
    "nesterov, decay": sgd(momentum=0.9, nesterov=True, weight_decay=0.05),
    "maximize": sgd(momentum=0.9, weight_decay=0.05, maximize=True),
    "one group has momentum": one_group_has_momentum,
    "adamw": adamw,
}


def density_one() -> thinwire.ReducerOptions:
    options = thinwire.top_k(1.0)
    options.momentum_masking = False
    options.dense_below = 0
    return options


OPTIONS = {"dense": thinwire.dense, "density 1": density_one}
NETWORKS = {"linear": lambda: nn.Linear(models.FEATURES, 1), "relu": models.Mlp}
BARS = {"linear": 1e-6, "relu": 1e-5}  # ‖Δθ‖ / ‖θ‖ after STEPS steps

# Attached before the first step; and after 20 steps, when the optimizer has momentum buffers to hand over.
CASES = [(optimizer, options, 0) for optimizer in OPTIMIZERS for options in OPTIONS]
CASES += [(optimizer, "density 1", 20) for optimizer in ("nesterov, decay", "maximize", "one group has momentum")]


def train(rank: int, network: str, optimizer: str, options: thinwire.ReducerOptions | None, attach_at: int) -> Tensor:
    """Parameters after STEPS steps; learning rates halve on the way."""
    torch.manual_seed(3)
    model = DistributedDataParallel(NETWORKS[network](), bucket_cap_mb=20 * models.KB)
    optim = OPTIMIZERS[optimizer](model)
    schedule = torch.optim.lr_scheduler.StepLR(optim, STEPS // 2, gamma=0.5)
    batches = models.Batches(rank)
    handle = None
    for step in range(STEPS):
        if options is not None and step == attach_at:
            handle = thinwire.ddp.attach(model, options, optim)
        optim.zero_grad()
        loss = models.loss_of(model, batches())
        (-loss if optimizer == "maximize" else loss).backward()
        optim.step()
        schedule.step()
    if handle:
        stats = handle.stats()
        assert stats.step == STEPS - attach_at - 1
        assert stats.active == (options.all_reduce == "all_gather")
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def differences(rank: int, world_size: int, network: str) -> dict:
    """Relative differences to plain DDP by case."""
    plain = {optimizer: train(rank, network, optimizer, None, 0) for optimizer in OPTIMIZERS}
    result = {}
    for case in CASES:
        optimizer, options, attach_at = case
        theta = train(rank, network, optimizer, OPTIONS[options](), attach_at)
        result[case] = float((theta - plain[optimizer]).norm() / plain[optimizer].norm())
    return result


@pytest.fixture(scope="module", params=[("linear", 3), ("relu", 2)], ids=str)
def measured(request: pytest.FixtureRequest) -> tuple[float, dict]:
    network, world_size = request.param
    return BARS[network], ranks.run(world_size, differences, network, limit=300)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_plain_ddp(measured: tuple[float, dict], case: tuple[str, str, int]) -> None:
    bar, difference = measured
    assert difference[case] <= bar
