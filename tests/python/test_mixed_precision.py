"""autocast and gradient scalers: residuals stay finite and in true units, a skipped step is taken back."""

import warnings

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire.ddp

BUCKET = {"bucket_cap_mb": 8 * models.KB}


def bits(model: nn.Module) -> int:
    return models.checksum(list(model.parameters()))


def same_everywhere(value: object) -> bool:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(other == value for other in everyone)


def scaled_run(rank: int, scales: list[float] | None) -> tuple[int, int]:
    """Twelve steps in f32; where there are scales, each step's loss is scaled by one of them."""
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp(), **BUCKET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scales is not None)
    handle = thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer, grad_scaler=scaler)
    batches = models.Batches(rank)
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(models.loss_of(model, batches())).backward()
        scaler.step(optimizer)
        scaler.update(None if scales is None else scales[step])
    residuals = models.state_of(handle)["residual"]
    return bits(model), models.checksum([residuals[name] for name in sorted(residuals)])


def true_units(rank: int, world_size: int) -> None:
    scaled = scaled_run(rank, [2.0 ** (16 - 3 * (step % 5)) for step in range(12)])
    assert scaled == scaled_run(rank, None)


def test_a_run_with_changing_scales_equals_one_without_bit_for_bit() -> None:
    ranks.run(2, true_units)


def overflow(rank: int, world_size: int, method: str) -> None:
    """fp16 autocast. In one step the loss of rank 1 is beyond f16."""
    torch.manual_seed(2)
    model = DistributedDataParallel(models.Mlp(), **BUCKET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=6)
    handle = thinwire.ddp.attach(model, models.METHODS[method](), optimizer, grad_scaler=scaler)
    batches = models.Batches(rank)
    scales = []
    for step in range(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = models.loss_of(model, batches())
        before, scale = bits(model), scaler.get_scale()
        bad = step == 10
        scaler.scale(loss * (1e30 if bad and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (bits(model) == before) == bad
        assert handle.stats().non_finite == bad
        assert scaler.get_scale() == (scale / 2 if bad else scaler.get_scale())
        state = models.state_of(handle)
        assert all(v.isfinite().all() for v in [*state["residual"].values(), *state["velocity"].values()])
        assert same_everywhere((bits(model), scaler.get_scale()))
        scales.append(scaler.get_scale())
    assert scales[10] < scales[9] < scales[-1]  # recovered


@pytest.mark.parametrize("method", ["top_k", "dragonn", "redsync_quantized"])
def test_an_overflow_on_one_rank_is_skipped_on_all_and_the_scale_recovers(method: str) -> None:
    ranks.run(3, overflow, method)


def residual_sum(handle: thinwire.ddp.Handle) -> Tensor:
    """Over all ranks, of each rank's residual, flat, f64."""
    residual = models.state_of(handle)["residual"]
    total = torch.cat([residual[name].double() for name in sorted(residual)])
    dist.all_reduce(total)
    return total


def skipped(rank: int, world_size: int, fused: bool) -> None:
    """A parameter outside the model overflows: the step is skipped although its gradients were reduced and sent."""
    torch.manual_seed(3)
    model = DistributedDataParallel(models.Mlp(), **BUCKET)
    outside = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer, grad_scaler=scaler)
    batches = models.Batches(rank)
    names = sorted(name for name, _ in model.module.named_parameters())
    plain = models.Mlp()

    def gradients(batch: tuple[Tensor, Tensor]) -> Tensor:
        plain.load_state_dict(model.module.state_dict())
        plain.zero_grad()
        models.loss_of(plain, batch).backward()
        by_name = dict(plain.named_parameters())
        total = torch.cat([by_name[name].grad.flatten().double() for name in names])
        dist.all_reduce(total)
        return total

    for step in range(8):
        batch = batches()
        before, expected = residual_sum(handle), gradients(batch)
        optimizer.zero_grad()
        bad = step == 5
        loss = models.loss_of(model, batch) + (outside.sum() * (float("inf") if bad else 1.0))
        scaler.scale(loss).backward()
        by_name = dict(model.module.named_parameters())
        sent = torch.cat([by_name[name].grad.flatten().double() for name in names]) / scaler.get_scale() * world_size
        assert sent.any()
        scaler.step(optimizer)
        scaler.update()
        applied = torch.zeros_like(sent) if bad else sent
        torch.testing.assert_close(residual_sum(handle) + applied, before + expected, rtol=1e-5, atol=1e-5)
        assert not handle.stats().non_finite


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_for_its_own_reasons_is_taken_back(fused: bool) -> None:
    ranks.run(2, skipped, fused)


def accumulation(rank: int, world_size: int) -> None:
    """Two synchronized backward passes before a step are no skipped step."""
    torch.manual_seed(4)
    model = DistributedDataParallel(models.Mlp(), **BUCKET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer, grad_scaler=scaler)
    batches = models.Batches(rank)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(models.loss_of(model, batches())).backward()
        before = residual_sum(handle)
        scaler.scale(models.loss_of(model, batches())).backward()
        assert not torch.equal(before, residual_sum(handle))
        scaler.step(optimizer)
        scaler.update()
    assert handle.step == 7
    assert same_everywhere(bits(model))


def test_accumulation_is_not_taken_for_a_skipped_step() -> None:
    ranks.run(2, accumulation)


def autocast(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    model = DistributedDataParallel(models.Mlp(), **BUCKET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer)
    batches = models.Batches(rank)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = models.loss_of(model, batches())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert same_everywhere(bits(model))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_bf16_autocast() -> None:
    ranks.run(2, autocast)


class Checkpointed(models.Mlp):
    """Recomputes its hidden layers in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.layers, x, use_reentrant=False))


def variants(rank: int, world_size: int) -> None:
    """torch.compile and activation checkpointing give what eager mode gives."""
    results = []
    for make, compiled in ((models.Mlp, False), (Checkpointed, False), (models.Mlp, True)):
        torch.manual_seed(6)
        model = DistributedDataParallel(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        handle = thinwire.ddp.attach(called, models.METHODS["redsync"](), optimizer)
        batches = models.Batches(rank)
        for _ in range(10):
            optimizer.zero_grad()
            models.loss_of(called, batches()).backward()
            optimizer.step()
        assert handle.stats().active
        assert handle.step == 9
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(results[1], results[0])
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)


def test_compiled_and_checkpointed_models_equal_eager_ones() -> None:
    ranks.run(2, variants)


def told_or_not(rank: int, world_size: int, given: bool, enabled: bool) -> list[str]:
    model = DistributedDataParallel(models.Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=256, enabled=enabled)
    thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer, grad_scaler=scaler if given else None)
    batches = models.Batches(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(models.loss_of(model, batches())).backward()
            scaler.step(optimizer)
            scaler.update()
    return [str(w.message) for w in caught if "GradScaler" in str(w.message)]


@pytest.mark.parametrize(("given", "enabled", "count"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_a_scaler_that_was_not_given_is_noticed_once(given: bool, enabled: bool, count: int) -> None:
    messages = ranks.run(1, told_or_not, given, enabled)[0]
    assert len(messages) == count
    assert all("grad_scaler=scaler" in message for message in messages)


def refused(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(models.Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    a_part = torch.optim.SGD(model.module.head.parameters(), lr=0.02)
    for scaler, word in (
        (torch.amp.GradScaler, "grad_scaler is a type"),
        (torch.amp.GradScaler("cpu", growth_factor=1.5), "growth_factor is 1.5"),
        (torch.amp.GradScaler("cpu", init_scale=1000.0), "scale is 1000.0"),
        (2.0, "grad_scaler is a float"),
    ):
        with pytest.raises(thinwire.Error, match=word):
            thinwire.ddp.attach(model, thinwire.top_k(), optimizer, grad_scaler=scaler)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(thinwire.Error, match="give optimizer"):
        thinwire.ddp.attach(model, thinwire.top_k(), grad_scaler=scaler)
    with pytest.raises(thinwire.Error, match=r"all the model's parameters, and it lacks 'layers\.0\.weight'"):
        thinwire.ddp.attach(model, thinwire.top_k(), a_part, grad_scaler=scaler)
    thinwire.ddp.attach(model, thinwire.top_k(), optimizer, grad_scaler=scaler)  # nothing was left behind


def test_a_scaler_that_does_not_fit_is_refused() -> None:
    ranks.run(1, refused)


def staged(rank: int, world_size: int) -> None:
    """By way of host buffers, as on a device without kernels: the same bits."""
    results = []
    for stage in (False, True):
        thinwire._buckets.needs_staging = lambda tensor, stage=stage: stage
        results.append(scaled_run(rank, [2.0 ** (step % 3) for step in range(12)]))
    assert results[0] == results[1]


def test_gradients_staged_through_host_memory_give_the_same_bits() -> None:
    ranks.run(2, staged)
