"""What users of gradient hooks ran into elsewhere, each as a test of the right behaviour: buckets, modes, state.

Every test names the public report. Cases that other files cover already are not repeated here.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp
from thinwire.c10d import TorchCommunicator

Hook = Callable[[thinwire.ddp.HookState, dist.GradBucket], torch.futures.Future[Tensor]]


def top_k_per_parameter(density: float) -> thinwire.ReducerOptions:
    options = models.sparse(thinwire.top_k(density))
    options.unit = "parameter"
    return options


def watched(model: DistributedDataParallel, options: thinwire.ReducerOptions, see: Callable[[dist.GradBucket], None]):
    """Attaches by a hook of our own that shows every bucket before thinwire's hook gets it."""
    state = thinwire.ddp.HookState(options, model.named_parameters())

    def hook(state: thinwire.ddp.HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        see(bucket)
        return thinwire.ddp.hook(state, bucket)

    model.register_comm_hook(state, hook)
    return state


class Oracle:
    """Exact top-k with error feedback for one parameter on all ranks, from the formula."""

    def __init__(self, numel: int, world_size: int, k: int) -> None:
        self.residuals = [torch.zeros(numel) for _ in range(world_size)]
        self._k = k

    def step(self, gradients: list[Tensor]) -> Tensor:
        """The mean of what the ranks send."""
        mean = torch.zeros_like(self.residuals[0])
        for residual, gradient in zip(self.residuals, gradients, strict=True):
            residual += gradient
            sent = residual.abs().topk(self._k).indices
            mean[sent] += residual[sent]
            residual[sent] = 0
        return mean / len(self.residuals)


def rebuilt(rank: int, world_size: int, arguments: dict) -> list[list[str]]:
    n, steps = 256, 6
    model = DistributedDataParallel(models.GivenGradients((16, 16), (16, 16)), **arguments)
    names = {id(p): name for name, p in model.module.named_parameters()}
    orders: list[list[str]] = []
    options = top_k_per_parameter(3 / n)
    handle = watched(model, options, lambda bucket: orders.append([names[id(p)] for p in bucket.parameters()]))
    oracles = [Oracle(n, world_size, 3) for _ in range(2)]
    # Integers, so that every sum is exact. Those of w1 are a thousand times those of w0.
    generator = torch.Generator().manual_seed(7)
    given = torch.stack([torch.randperm(n, generator=generator) + 1 for _ in range(steps * world_size)]).float()
    given = given.view(steps, world_size, 16, 16)
    for step in range(steps):
        model.zero_grad()
        scales = (1.0, 1000.0)
        model(*(scale * given[step, rank] for scale in scales)).backward()
        state = models.state_of(handle)["residual"]
        for i, (scale, oracle) in enumerate(zip(scales, oracles, strict=True)):
            mean = oracle.step([scale * g.flatten() for g in given[step]])
            assert torch.equal(getattr(model.module, f"w{i}").grad.flatten(), mean), (step, i)
            assert torch.equal(state[f"w{i}"], oracle.residuals[rank]), (step, i)
    return orders


REBUILD_AFTER = {"plain": 1, "bucket_view": 1, "static_graph": 2, "find_unused": None}
ARGUMENTS = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("mode", ARGUMENTS)
def test_a_residual_stays_with_its_parameter_when_equal_buckets_swap(mode: str) -> None:
    """pytorch#48867, #48670, #49418, #44798: errors kept by bucket index or by tensor went to another parameter, or
    were lost, when DDP rebuilt its buckets in another order of the same length. powersgd#3, marian-dev#51: what a rank
    keeps is its own sum minus what it sent itself."""
    for orders in ranks.run(2, rebuilt, ARGUMENTS[mode]):
        changes = [i for i in range(1, len(orders)) if orders[i] != orders[i - 1]]
        assert changes == ([] if REBUILD_AFTER[mode] is None else [REBUILD_AFTER[mode]])
        assert all(sorted(order) == ["w0", "w1"] for order in orders)


def poisoned(rank: int, world_size: int) -> None:
    results = []
    for poison in (False, True):
        torch.manual_seed(3)
        model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
        buffers: list[Tensor] = []
        handle = watched(model, models.METHODS["top_k"](), lambda bucket, seen=buffers: seen.append(bucket.buffer()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        batches = models.Batches(rank)
        for step in range(8):
            optimizer.zero_grad()
            for passes in range(1 + step % 2, 0, -1):
                with model.no_sync() if passes > 1 else nullcontext():
                    models.loss_of(model, batches()).backward()
            optimizer.step()
            if poison:
                for buffer in buffers:
                    buffer.fill_(torch.nan)
            buffers.clear()
        residual = models.state_of(handle)["residual"]
        results.append(models.checksum([*model.parameters(), *residual.values()]))
    assert results[0] == results[1]


def test_nothing_is_read_from_bucket_memory_after_the_step() -> None:
    """pytorch#43307: with a hook the loss was NaN after three iterations, since views of buckets were kept."""
    ranks.run(2, poisoned)


def sizes(state: dict) -> dict[str, int]:
    tensors = {f"{what}.{name}": v.numel() for what in ("residual", "velocity") for name, v in state[what].items()}
    return {**tensors, "decay_momentum": len(state["decay_momentum"])}


def soak(rank: int, world_size: int) -> int:
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Branches(), find_unused_parameters=True, bucket_cap_mb=models.KB / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.001)
    handle = thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer)
    batches = models.Batches(rank)
    after_three = None
    for step in range(300):
        optimizer.zero_grad()
        models.loss_of(model, batches(), (step + rank) % 3).backward()
        optimizer.step()
        if step == 2:
            after_three = sizes(models.state_of(handle))
        if step % 50 == 49:
            assert sizes(models.state_of(handle)) == after_three
    assert handle.stats().jobs >= 8
    assert handle.stats().calls == handle.stats().jobs
    return models.checksum(list(model.parameters()))


def test_replicas_are_equal_and_state_constant_after_300_steps_of_many_buckets() -> None:
    """DeMo's code warns that replicas may drift apart; the state of PyTorch's PowerSGD hook grew (pytorch#48670), and
    with several buckets it hung on Gloo."""
    assert len(set(ranks.run(2, soak))) == 1


def joined(rank: int, world_size: int) -> None:
    n = 256
    model = DistributedDataParallel(models.GivenGradients((16, 16), (20, 20)))
    handle = thinwire.ddp.attach(model, top_k_per_parameter(0.02))
    generator = torch.Generator().manual_seed(rank)
    sizes_of = [n, 400]
    given, received = torch.zeros(sum(sizes_of)), torch.zeros(sum(sizes_of))
    waiting = []
    with Join([model]):
        for _ in range(4 + 6 * rank):
            model.zero_grad()
            gradients = [torch.randint(-99, 100, p.shape, generator=generator).float() for p in model.parameters()]
            model(*gradients).backward()
            given += torch.cat([g.flatten() for g in gradients])
            received += torch.cat([p.grad.flatten() for p in model.parameters()]) * world_size
            waiting.append(int(sum(v.count_nonzero() for v in models.state_of(handle)["residual"].values())))
    residual = torch.cat(list(models.state_of(handle)["residual"].values()))
    left = int(residual.count_nonzero())
    # Shadow steps have no gradient: each sends 5 + 8 entries of what waits here.
    others = 4 + 6 * (world_size - 1) - len(waiting)
    assert left == max(0, waiting[-1] - 13 * others)
    dist.all_reduce(given)
    dist.all_reduce(residual)
    if rank == world_size - 1:  # saw every mean
        torch.testing.assert_close(received + residual, given, rtol=0, atol=1e-3)


def test_a_rank_that_has_joined_drains_its_residual() -> None:
    """pytorch#60611, #61020: hooks and uneven inputs failed together."""
    ranks.run(3, joined)


def equal_after_join(rank: int, world_size: int) -> int:
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS["dragonn"](), optimizer)
    batches = models.Batches(rank)
    for _ in range(2):
        with Join([model]):
            for _ in range(5 + 4 * rank):
                optimizer.zero_grad()
                models.loss_of(model, batches()).backward()
                optimizer.step()
    assert handle.step == 2 * (5 + 4 * (world_size - 1)) - 1
    return models.checksum(list(model.parameters()))


def test_replicas_are_equal_after_uneven_inputs() -> None:
    """pytorch#60611, #61020."""
    assert len(set(ranks.run(3, equal_after_join))) == 1


def accumulated(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(models.GivenGradients((16, 16)))
    handle = thinwire.ddp.attach(model, top_k_per_parameter(0.1))
    gradient = torch.arange(256.0).view(16, 16)
    in_window = []
    for _ in range(4):
        for passes in range(4, 0, -1):
            with model.no_sync() if passes > 1 else nullcontext():
                model(gradient).backward()
        in_window.append(handle.stats().bytes_sent)
        model.zero_grad()
    assert handle.step == 3
    for _ in range(4):  # the same without no_sync: DDP calls the hook four times
        model(gradient).backward()
    assert handle.step == 7
    assert handle.stats().bytes_sent == in_window[-1]


def test_bytes_of_a_step_tell_whether_accumulation_saves_communication() -> None:
    """cosmos-framework#161: gradient accumulation silently saved nothing."""
    ranks.run(2, accumulated)


def static_and_no_sync(rank: int, world_size: int, starts_with_no_sync: bool) -> int:
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp(), static_graph=True, bucket_cap_mb=8 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    batches = models.Batches(rank)
    # What DDP itself says is not masked, and nobody waits for a rank that fails so.
    refusal = pytest.raises(RuntimeError, match=r"INTERNAL ASSERT FAILED|Expected to have finished reduction")
    for step in range(6):
        optimizer.zero_grad()
        with refusal if starts_with_no_sync else nullcontext():
            if starts_with_no_sync or step > 0:
                with model.no_sync():
                    models.loss_of(model, batches()).backward()
            models.loss_of(model, batches()).backward()
        optimizer.step()
    assert handle.step == (0 if starts_with_no_sync else 5)
    return models.checksum(list(model.parameters()))


def test_a_static_graph_and_no_sync() -> None:
    """pytorch#187732: if the first backward pass is one of no_sync, an assertion fails in DDP, and later steps are not
    reduced. After a first step that is reduced the two go together."""
    ranks.run(2, static_and_no_sync, True)
    assert len(set(ranks.run(2, static_and_no_sync, False))) == 1


def other_order(rank: int, world_size: int) -> list[str]:
    sentences = []
    for mine, other in ([["a", "b"], ["b", "a"]], [["a", "b"], ["a"]]):
        communicator = TorchCommunicator(timeout=20)
        reducer = thinwire.Reducer(models.sparse(thinwire.top_k(0.1)), [("a", 300), ("b", 300)], communicator)
        names = mine if rank == 0 else other
        reducer.begin_step()
        with pytest.raises(thinwire.Error) as caught:
            reducer.reduce([(name, 300, True) for name in names], torch.ones(300 * len(names))).wait()
        sentences.append(str(caught.value))
        reducer.close()
    return sentences


def test_ranks_whose_buckets_differ_are_told_before_anything_is_mixed() -> None:
    """torchft#41: a replica whose buckets had not been rebuilt yet diverged from the others."""
    results = ranks.run(2, other_order)
    for sentence in (s for result in results for s in result):
        assert "bucket" in sentence
        assert "rank 1" in sentence or "rank 0" in sentence


def test_signature_of_the_hook() -> None:
    """pytorch#102721, and a check in DDP that looks up a parameter of the name `bucket` and compares annotations."""
    assert inspect.isfunction(thinwire.ddp.hook)
    signature = inspect.signature(thinwire.ddp.hook)
    assert list(signature.parameters) == ["state", "bucket"]
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    nn.parallel.DistributedDataParallel._check_comm_hook(None, thinwire.ddp.hook)
