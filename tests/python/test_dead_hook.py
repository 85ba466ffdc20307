"""A hook that DDP does not call, for an optimizer that steps all the same: one warning that says which and why, and
statistics that do not claim to compress. And no warning where nothing is wrong."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


class Training:
    """A model under DDP with thinwire attached, and its optimizer."""

    def __init__(self, rank: int, scaler: torch.amp.GradScaler | None = None, **arguments: bool) -> None:
        self.network = models.Mlp()
        self.model = DistributedDataParallel(self.network, **arguments)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.02, momentum=0.9)
        self.handle = thinwire.ddp.attach(self.model, models.METHODS["top_k"](), self.optimizer, grad_scaler=scaler)
        self.batches = models.Batches(rank)

    def backward(self, model: nn.Module | None = None) -> torch.Tensor:
        """Adds the gradients of one batch; through DDP unless another model is given."""
        loss = models.loss_of(model or self.model, self.batches())
        loss.backward()
        return loss

    def step(self) -> None:
        """A plain one."""
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()


@contextmanager
def one_warning(handle: thinwire.ddp.Handle, which: str, why: str) -> Iterator[None]:
    """Expects exactly one warning inside, from the line that called the optimizer, and statistics that agree."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [w for w in caught if "thinwire" in str(w.message)]
    assert len(ours) == 1, [str(w.message) for w in caught]
    sentence = str(ours[0].message)
    assert which in sentence and why in sentence, sentence
    assert ours[0].filename == __file__
    stats = handle.stats()
    assert not stats.active and stats.jobs == 0 and stats.reason == sentence
    assert handle.report() == f"step {stats.step}: inactive, {sentence}"


# What is wrong.


def unregistered(rank: int) -> None:
    """As under Lightning's DDPStrategy on CPU, which takes the pair and does nothing with it."""
    network = models.Mlp()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    state = thinwire.ddp.HookState(models.METHODS["top_k"](), network.named_parameters(), optimizer)
    assert state.report() == "step 0: inactive, DDP has not called the hook yet"
    batches = models.Batches(rank)
    with one_warning(state, "8 parameters, 'layers.0.weight' among them", "Lightning's DDPStrategy"):
        for _ in range(3):
            optimizer.zero_grad()
            models.loss_of(model, batches()).backward()
            optimizer.step()


def unregistered_with_closure(rank: int) -> None:
    network = models.Mlp()
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.02, max_iter=2)
    state = thinwire.ddp.HookState(models.METHODS["top_k"](), network.named_parameters(), optimizer)
    batch = models.Batches(rank)()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(network, batch)
        loss.backward()
        return loss

    with one_warning(state, "8 parameters", "no model has registered it"):
        optimizer.step(closure)


def past_ddp(rank: int) -> None:
    training = Training(rank)
    training.step()
    assert training.handle.stats().active
    with one_warning(training.handle, "8 parameters", "did not go through the DistributedDataParallel around Mlp"):
        for _ in range(2):
            training.optimizer.zero_grad()
            training.backward(training.network)
            training.optimizer.step()
    training.step()
    assert training.handle.stats().active


def step_under_no_sync(rank: int) -> None:
    training = Training(rank)
    training.step()
    with one_warning(training.handle, "8 parameters", "the last forward pass ran under no_sync()"):
        training.optimizer.zero_grad()
        training.backward()
        with training.model.no_sync():  # in the wrong order: the last pass is the one that must not have it
            training.backward()
        training.optimizer.step()


def static_graph_with_no_sync(rank: int) -> None:
    """torch refuses a first pass under no_sync; what lets it through (pytorch#187732) ends in DDP not reducing."""
    training = Training(rank, static_graph=True)
    with one_warning(training.handle, "8 parameters", "static_graph=True stops reducing once no_sync() was used"):
        for step in range(2):
            training.optimizer.zero_grad()
            for last in (False, True):
                if step == 0:
                    training.model._static_graph_delay_allreduce_enqueued = not last
                with nullcontext() if last else training.model.no_sync():
                    training.backward()
            training.optimizer.step()


# What is not.


def accumulation(rank: int) -> None:
    training = Training(rank)
    for _ in range(3):
        training.optimizer.zero_grad()
        with training.model.no_sync():
            training.backward()
            training.backward()
        training.backward()
        training.optimizer.step()


def static_graph(rank: int) -> None:
    training = Training(rank, static_graph=True)
    for _ in range(4):
        training.step()


def shadow_steps(rank: int) -> None:
    training = Training(rank)
    with Join([training.model]):
        for _ in range(2 + 3 * rank):
            training.step()
    dist.barrier()


def other_parameters(rank: int) -> None:
    """Steps of an optimizer beside the model's, also while gradients of the model wait for more."""
    training = Training(rank)
    other = nn.Parameter(torch.ones(3))
    beside = torch.optim.SGD([other], lr=0.1)
    for _ in range(3):
        training.optimizer.zero_grad()
        with training.model.no_sync():
            training.backward()
        other.square().sum().backward()
        beside.step()
        training.backward()
        training.optimizer.step()


def skipped_by_a_scaler(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    training = Training(rank, scaler)
    for step in range(4):
        training.optimizer.zero_grad()
        loss = models.loss_of(training.model, training.batches())
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(training.optimizer)
        scaler.update()


def discarded_gradients(rank: int) -> None:
    """Gradients that DDP has not seen, thrown away before the optimizer steps."""
    training = Training(rank)
    training.step()
    training.backward(training.network)
    training.optimizer.zero_grad()
    training.handle.flush()
    training.optimizer.step()
    training.backward(training.network)
    training.optimizer.zero_grad()
    training.optimizer.step()


def two_networks(rank: int) -> None:
    """A GAN: the gradients of the generator's loss pass through the critic, which is then trained by itself."""
    generator = Training(rank)
    critic_network = nn.Linear(1, 300)
    critic = DistributedDataParallel(critic_network)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
    thinwire.ddp.attach(critic, models.METHODS["top_k"](), optimizer)
    for _ in range(3):
        generator.optimizer.zero_grad()
        critic_network(generator.model(generator.batches()[0])).square().mean().backward()
        generator.optimizer.step()
        optimizer.zero_grad()
        critic(generator.network(generator.batches()[0]).detach()).square().mean().backward()
        optimizer.step()


def two_optimizers(rank: int) -> None:
    """Of one model, each stepping after a backward pass of its own."""
    network = models.Mlp()
    model = DistributedDataParallel(network, find_unused_parameters=True)
    first = torch.optim.SGD(network.layers.parameters(), lr=0.02)
    second = torch.optim.SGD(network.head.parameters(), lr=0.02, momentum=0.9)
    thinwire.ddp.attach(model, models.METHODS["top_k"](), second)
    batches = models.Batches(rank)
    for _ in range(3):
        for optimizer in (first, second):
            model.zero_grad()
            models.loss_of(model, batches()).backward()
            optimizer.step()


def flushed(rank: int) -> None:
    training = Training(rank)
    training.step()
    training.handle.flush()
    training.optimizer.step()
    training.step()


def frozen(rank: int) -> None:
    """All but the head from the second step on; and a step before there are any gradients."""
    training = Training(rank, find_unused_parameters=True)
    training.optimizer.step()
    training.step()
    training.network.layers.requires_grad_(False)
    for _ in range(2):
        training.step()


def closures(rank: int) -> None:
    """LBFGS calls its closure several times; Lightning's accumulation comes before the step."""
    training = Training(rank)
    training.handle.detach()
    optimizer = torch.optim.LBFGS(training.network.parameters(), lr=0.02, max_iter=3)
    training.handle.attach(models.METHODS["top_k"](), optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return training.backward()

    for _ in range(2):
        optimizer.step(closure)
    with training.model.no_sync():
        training.backward()
    optimizer.step(training.backward)


def extra_pass(rank: int) -> None:
    """A pass past DDP whose gradients are thrown away."""
    training = Training(rank)
    for _ in range(2):
        training.backward(training.network)
        training.step()


def ignored_parameter(rank: int) -> None:
    """DDP leaves it to the rank, and the pair of state and hook was told about it."""
    network = models.Mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["head.bias"])
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    state = thinwire.ddp.HookState(models.METHODS["top_k"](), network.named_parameters(), optimizer)
    model.register_comm_hook(state, thinwire.ddp.hook)
    batches = models.Batches(rank)
    for _ in range(2):
        optimizer.zero_grad()
        models.loss_of(model, batches()).backward()
        optimizer.step()


WRONG = [unregistered, unregistered_with_closure, past_ddp, step_under_no_sync, static_graph_with_no_sync]
FINE = [
    accumulation,
    static_graph,
    shadow_steps,
    other_parameters,
    skipped_by_a_scaler,
    discarded_gradients,
    two_networks,
    two_optimizers,
    flushed,
    frozen,
    closures,
    extra_pass,
    ignored_parameter,
]


def silently(rank: int, world_size: int, case: Callable[[int], None]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*thinwire.*")
        case(rank)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_is_noticed(case: Callable[[int], None]) -> None:
    ranks.run(2, lambda rank, world_size: case(rank))


@pytest.mark.parametrize("case", FINE, ids=lambda case: case.__name__)
def test_is_fine(case: Callable[[int], None]) -> None:
    ranks.run(2, silently, case)
