"""What is wrong is said in one clear sentence that names the thing, and nothing has changed then."""

import copy
import re

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


class Case:
    """Sets up a mistake, on every rank alike; returns the call that must be refused, and a pattern for its sentence."""

    def __init__(self) -> None:
        self.network = models.Mlp()
        self.options = models.METHODS["top_k"]()
        self.hyper: dict = {}

    @property
    def model(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.network)

    def sgd(self, **hyper: float) -> torch.optim.SGD:
        return torch.optim.SGD(self.network.parameters(), lr=0.02, **hyper)


def not_ddp(case: Case):
    return (case.network, case.options, case.sgd()), r"the model is a Mlp, expected a DistributedDataParallel"


def not_options(case: Case):
    return (case.model, 0.01, case.sgd()), r"options is a float, expected ReducerOptions"


def double_parameter(case: Case):
    case.network.head.double()
    return (case.model, case.options), r"parameter 'head.weight' is float64, expected float32, float16 or bfloat16"


def complex_parameter(case: Case):
    case.network.head.to(torch.complex64)
    return (case.model, case.options), r"parameter 'head.weight' is complex64"


def second_hook(case: Case):
    model = case.model
    model.register_comm_hook(None, allreduce_hook)
    optimizer = case.sgd(momentum=0.9)
    return (model, case.options, optimizer), r"the model has a communication hook already, and DDP takes only one"


def two_momenta(case: Case):
    case.options.momentum = 0.9
    return (case.model, case.options, case.sgd(momentum=0.8)), (
        r"the options have momentum 0.9, and the optimizer keeps its own momentum \(0.8 in parameter group 0\)"
    )


def momentum_in_a_rule(case: Case):
    case.options.rules = [thinwire.ParameterRule("*", momentum=0.5)]
    return (case.model, case.options, case.sgd(momentum=0.8)), r"the optimizer keeps its own momentum"


def momentum_and_adam(case: Case):
    case.options.momentum = 0.9
    adam = torch.optim.Adam(case.network.parameters())
    return (case.model, case.options, adam), r"the optimizer keeps its own momentum \(\(0.9, 0.999\) in parameter"


def decay_beside_momentum(case: Case):
    case.options.momentum = 0.9
    return (
        case.model,
        case.options,
        case.sgd(weight_decay=0.1),
    ), r"has weight_decay 0.1, which needs the same momentum"


def dampening(case: Case):
    return (case.model, case.options, case.sgd(momentum=0.9, dampening=0.1)), r"group 0 .* dampening 0.1"


def one_cycle(case: Case):
    optimizer = case.sgd(momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    return (
        case.model,
        case.options,
        optimizer,
    ), r"a scheduler cycles the momentum of parameter group 0.*cycle_momentum"


def cyclic(case: Case):
    optimizer = case.sgd(momentum=0.9)
    torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)
    return (
        case.model,
        case.options,
        optimizer,
    ), r"a scheduler cycles the momentum of parameter group 0.*cycle_momentum"


def density(case: Case):
    case.options.momentum = 1.5
    return (case.model, case.options), r"momentum is 1.5.*not in \[0, 1\)"


def no_error_feedback_with_momentum(case: Case):
    case.options.error_feedback, case.options.momentum = False, 0.9
    return (case.model, case.options), r"error_feedback is off but momentum is 0.9"


def negative_timeout(case: Case):
    return (case.model, case.options, None, None, -1.0), r"timeout is -1.0 s, must be positive"


CASES = [
    not_ddp,
    not_options,
    double_parameter,
    complex_parameter,
    second_hook,
    two_momenta,
    momentum_in_a_rule,
    momentum_and_adam,
    decay_beside_momentum,
    dampening,
    one_cycle,
    cyclic,
    density,
    no_error_feedback_with_momentum,
    negative_timeout,
]


def refusals(rank: int, world_size: int) -> dict[str, str]:
    result = {}
    for mistake in CASES:
        case = Case()
        arguments, pattern = mistake(case)
        optimizer = next((a for a in arguments if isinstance(a, torch.optim.Optimizer)), None)
        before = optimizer.state_dict() if optimizer else None
        with pytest.raises(thinwire.Error) as caught:
            thinwire.ddp.attach(*arguments)
        sentence = str(caught.value)
        assert re.search(pattern, sentence), sentence
        assert "\n" not in sentence
        assert caught.value.code == "invalid_argument"
        if optimizer:
            assert optimizer.state_dict() == before
            assert not optimizer._optimizer_step_pre_hooks
    return result


def test_attach_refuses() -> None:
    ranks.run(2, refusals)


def momentum_comes_back(rank: int, world_size: int) -> list[str]:
    sentences = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        models.loss_of(model, models.Batches(rank)()).backward()
        optimizer.step()

    for mistake in ("one cycle", "cyclic", "set", "load", "decay", "from nothing"):
        case = Case()
        model = case.model
        optimizer = case.sgd(**({} if mistake == "from nothing" else {"momentum": 0.9, "weight_decay": 0.01}))
        saved = optimizer.state_dict()
        thinwire.ddp.attach(model, case.options, optimizer)
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.001  # may change freely
        step(model, optimizer)
        if mistake == "one cycle":
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        elif mistake == "cyclic":
            torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)
        elif mistake == "load":
            optimizer.load_state_dict(saved)
        elif mistake == "decay":
            optimizer.param_groups[0]["weight_decay"] = 0.1
        else:
            optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(thinwire.Error) as caught:
            step(model, optimizer)
        sentences.append(str(caught.value))
    return sentences


def test_an_optimizer_that_keeps_its_own_momentum_again() -> None:
    *others, decay, nothing = ranks.run(2, momentum_comes_back)[0]
    for sentence in (*others, nothing):
        assert "an optimizer that keeps its own momentum would apply it twice" in sentence
    assert "group 0 of the optimizer has weight_decay 0.1" in decay


def schedulers_of_rates(rank: int, world_size: int) -> None:
    """Cycles of the learning rate alone, and those of Adam's betas, which stay with the optimizer."""
    schedulers = torch.optim.lr_scheduler
    for kind in ("one cycle", "cyclic", "adam"):
        case = Case()
        model, optimizer = case.model, case.sgd(momentum=0.9)
        if kind == "one cycle":
            scheduler = schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
        elif kind == "cyclic":
            scheduler = schedulers.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, cycle_momentum=False)
        else:
            optimizer = torch.optim.Adam(case.network.parameters())
            scheduler = schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        thinwire.ddp.attach(model, case.options, optimizer)
        rates = set()
        for _ in range(4):
            models.loss_of(model, models.Batches(rank)()).backward()
            optimizer.step()
            scheduler.step()
            rates.add(optimizer.param_groups[0]["lr"])
        assert len(rates) == 4


def test_schedulers_that_leave_momentum_alone() -> None:
    ranks.run(2, schedulers_of_rates)


def fine(rank: int, world_size: int) -> None:
    """Parameters that the model does not have, and parameters in no optimizer."""
    network = models.Mlp()
    model = DistributedDataParallel(network)
    own, twin = (nn.Parameter(torch.ones(3)) for _ in range(2))
    hyper = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    optimizer = torch.optim.SGD([network.head.weight, own], **hyper)
    alone = torch.optim.SGD([twin], **hyper)
    batches = models.Batches(rank)
    untouched = network.head.bias.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        alone.zero_grad()
        models.loss_of(model, batches()).backward()
        for p in (own, twin):
            (p * p).sum().backward()
        optimizer.step()
        alone.step()

    step()
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    for _ in range(4):
        step()
    torch.testing.assert_close(own, twin)
    assert models.state_of(handle)["velocity"].keys() == {"head.weight"}
    handle.load_state_dict(handle.state_dict())
    step()
    handle.detach()
    step()
    torch.testing.assert_close(own, twin)
    assert torch.equal(network.head.bias, untouched)


def test_optimizer_and_model_need_not_have_the_same_parameters() -> None:
    ranks.run(2, fine)


def without_error_feedback(rank: int, world_size: int) -> None:
    case = Case()
    case.options.error_feedback = False
    optimizer = case.sgd(momentum=0.9)
    model = case.model
    handle = thinwire.ddp.attach(model, case.options, optimizer)
    models.loss_of(model, models.Batches(rank)()).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert handle.stats().active


def test_without_error_feedback_the_optimizer_keeps_its_momentum() -> None:
    ranks.run(2, without_error_feedback)


def train_with(rank: int, has_closure: bool) -> int:
    torch.manual_seed(1)
    case = Case()
    model, optimizer, batches = case.model, case.sgd(momentum=0.9, weight_decay=0.1), models.Batches(rank)
    thinwire.ddp.attach(model, case.options, optimizer)

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, batches())
        loss.backward()
        return loss

    for step in range(6):
        if not has_closure:
            backward()
            optimizer.step()
        elif step % 2:
            assert optimizer.step(backward) > 0
        else:
            assert optimizer.step(closure=backward) > 0
    return models.checksum(list(model.parameters()))


def closures(rank: int, world_size: int) -> None:
    """Lightning computes gradients inside the step."""
    assert train_with(rank, False) == train_with(rank, True)


def test_a_closure_gives_the_same() -> None:
    ranks.run(2, closures)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(thinwire.Error, match="there is no process group"):
        thinwire.ddp.HookState(thinwire.redsync(), models.Mlp().named_parameters())


def test_no_parameters() -> None:
    with pytest.raises(thinwire.Error, match="there is no parameter that requires a gradient"):
        thinwire.ddp.HookState(thinwire.redsync(), [])


def outside_of_the_group(rank: int, world_size: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(thinwire.Error, match="this process is not a member of the process group"):
            thinwire.ddp.HookState(thinwire.redsync(), models.Mlp().named_parameters(), process_group=group)


def test_a_process_outside_of_the_group() -> None:
    ranks.run(2, outside_of_the_group)


def spoilt_buffers(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(models.Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    models.loss_of(model, models.Batches(rank)()).backward()
    optimizer.step()
    last = list(model.parameters())[-1]
    before = {p: optimizer.state[p]["momentum_buffer"] for p in model.parameters()}
    for spoilt, word in (
        (torch.full_like(last, torch.nan), "not finite"),
        (torch.zeros(3), r"has the shape \(3,\), expected the shape \(1,\)"),
        ("buffer", "is 'buffer'"),
    ):
        optimizer.state[last]["momentum_buffer"] = spoilt
        with pytest.raises(thinwire.Error, match=rf"momentum buffer of 'head\.bias' .*{word}"):
            thinwire.ddp.attach(model, thinwire.top_k(), optimizer)
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert all(optimizer.state[p]["momentum_buffer"] is b for p, b in before.items() if p is not last)
    optimizer.state[last]["momentum_buffer"] = before[last]
    thinwire.ddp.attach(model, thinwire.top_k(), optimizer)


def test_momentum_buffers_that_do_not_fit_leave_the_optimizer_as_it_was() -> None:
    ranks.run(1, spoilt_buffers)


def copied_model(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(models.Mlp())
    thinwire.ddp.attach(model, thinwire.top_k())
    twin = copy.deepcopy(model)
    handle = thinwire.ddp.attach(twin, thinwire.top_k())
    models.loss_of(twin, models.Batches(rank)()).backward()
    assert handle.stats().jobs == 1


def test_a_copy_of_an_attached_model_may_be_attached() -> None:
    ranks.run(2, copied_model)


def other_optimizers(rank: int, world_size: int) -> None:
    model, other = DistributedDataParallel(models.Mlp()), models.Mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.02, momentum=0.9)
    with pytest.raises(thinwire.Error, match=r"none of the model's parameters, such as 'layers\.0\.weight'"):
        thinwire.ddp.attach(model, thinwire.top_k(), optimizer)
    with pytest.raises(thinwire.Error, match="optimizer is a list, expected one torch"):
        thinwire.ddp.attach(model, thinwire.top_k(), [optimizer])
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_an_optimizer_of_another_model_is_refused() -> None:
    ranks.run(1, other_optimizers)
