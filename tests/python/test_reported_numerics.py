"""What users of gradient compression ran into elsewhere, each as a test of the right behaviour: numbers, bytes, sizes.

Every test names the public report. Ranks are threads where PyTorch has no part in it.
"""

import itertools
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp
from thinwire import Codec, HashedSlots, ReducerOptions, SampledTopK, ThresholdSearch, TopK, TrimmedTopK


class Result:
    """What one rank of `on_threads` saw: means by step and parameter, then the residual."""

    def __init__(self) -> None:
        self.means: list[dict[str, Tensor]] = []
        self.residual: dict[str, Tensor] = {}
        self.stats: list[thinwire.StepStats] = []


def on_threads(options: ReducerOptions, gradients: list[list[dict[str, Tensor]]]) -> list[Result]:
    """Reduces gradients[rank][step][name], all of a step in one bucket of their dtype."""
    first = gradients[0][0]
    numels = [(name, g.numel()) for name, g in first.items()]

    def train(communicator: thinwire.Communicator) -> Result:
        result = Result()
        reducer = thinwire.Reducer(options, numels, communicator)
        for step in gradients[communicator.rank()]:
            bucket = torch.cat(list(step.values()))
            reducer.begin_step()
            reducer.reduce([(name, numel, True) for name, numel in numels], bucket).wait()
            result.means.append(dict(zip(first, bucket.split([numel for _, numel in numels]), strict=True)))
            result.stats.append(reducer.stats())
        result.residual = {name: torch.from_dlpack(v) for name, v in reducer.state()["residual"].items()}
        reducer.close()
        return result

    return ranks.as_threads(thinwire.make_thread_communicators(len(gradients)), train)


def normal(world_size: int, steps: int, numels: dict[str, int], dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [
        [{name: torch.randn(n, generator=generator).to(dtype) for name, n in numels.items()} for _ in range(steps)]
        for _ in range(world_size)
    ]


def imbalance(gradients: list[list[dict[str, Tensor]]], results: list[Result]) -> float:
    """Largest difference between what went in, and what came out and what waits, relative to the largest sum."""
    worst, largest = 0.0, 0.0
    for name in gradients[0][0]:
        given = sum(step[name].double() for rank in gradients for step in rank)
        received = len(results) * sum(mean[name].double() for mean in results[0].means)
        waiting = sum(result.residual[name].double() for result in results)
        worst = max(worst, float((received + waiting - given).abs().max()))
        largest = max(largest, float(given.abs().max()))
    return worst / largest


PRESETS = {**models.METHODS, "dense": thinwire.dense}
DTYPES = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}  # what rounding of the means may lose


@pytest.mark.parametrize("world_size", [3, 5, 6, 7])
@pytest.mark.parametrize("preset", PRESETS)
def test_any_number_of_ranks(preset: str, world_size: int) -> None:
    """DeepSpeed#4886: world sizes had to be multiples of 8."""
    gradients = normal(world_size, 4, {"w": 1000, "b": 7})
    results = on_threads(PRESETS[preset](), gradients)
    assert imbalance(gradients, results) <= 1e-6
    for result in results:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(result.means, results[0].means, strict=True) for n in a)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_size_from_1_to_130(preset: str) -> None:
    """DRAGONN's code divided by zero for tiny tensors, selected nothing, and never sent element 0."""
    options = PRESETS[preset]()
    options.dense_below = 0
    gradients = normal(2, 3, {f"w{n}": n for n in range(1, 131)})
    for rank in gradients:
        for n in range(1, 131):
            rank[0][f"w{n}"][0] = 50.0  # by far the largest: every exact selection sends it at once
    results = on_threads(options, gradients)
    assert imbalance(gradients, results) <= 1e-6
    if preset not in ("redsync_quantized", "top_k"):  # a mean of one sign; a k for all of the bucket
        assert all(float(mean[0]) == 50.0 for mean in results[0].means[0].values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_takes_every_dtype(preset: str, dtype: torch.dtype) -> None:
    """mxnet#15252: 2-bit compression failed with f16 gradients."""
    gradients = normal(2, 3, {"w": 2000, "b": 10}, dtype)
    results = on_threads(PRESETS[preset](), gradients)
    assert results[0].means[0]["w"].dtype == dtype
    assert imbalance(gradients, results) <= DTYPES[dtype]
    assert all(stats.active == (preset != "dense") for stats in results[0].stats)


SELECTORS = [TopK(0.02), TrimmedTopK(0.02), HashedSlots(0.02), HashedSlots(0.02, "a"), ThresholdSearch(0.02)]
SELECTORS += [ThresholdSearch(0.02, 1), SampledTopK(0.02)]
INDICES, VALUES = ("raw_u32", "elias_fano"), ("f32", "bf16", "f16", "shared_mean")


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_every_selector_and_codec_works_or_is_refused_at_construction(selector: object) -> None:
    """mxnet#15252. horovod#1230: compressors without options."""
    gradients = normal(2, 4, {"w": 2000})
    refused = set()
    for indices, values in itertools.product(INDICES, VALUES):
        options = ReducerOptions(selector=selector, codec=Codec(indices, values), dense_below=0)
        communicators = thinwire.make_thread_communicators(1)
        try:
            thinwire.Reducer(options, [("w", 2000)], communicators[0]).close()
        except thinwire.Error as error:
            assert error.code == "invalid_argument"
            refused.add((indices, values))
            continue
        assert imbalance(gradients, on_threads(options, gradients)) <= 1e-6
    # Slots are sent as they lie, and a threshold that is reused knows nothing of the other sign.
    is_layout_a = isinstance(selector, HashedSlots) and selector.layout == "a"
    reuses = isinstance(selector, ThresholdSearch) and selector.reuse_interval > 1
    assert refused == {
        (i, v)
        for i, v in itertools.product(INDICES, VALUES)
        if (is_layout_a and i == "elias_fano") or ((is_layout_a or reuses) and v == "shared_mean")
    }


def test_entries_that_several_ranks_send_are_added() -> None:
    """DRAGONN's code overwrote duplicates, and gave the sum instead of the mean."""
    gradients = [[{"w": torch.zeros(500)}] for _ in range(3)]
    for rank in range(3):
        gradients[rank][0]["w"][:3] = torch.tensor([30.0, 60.0, 90.0]) * (rank + 1)
    for preset in ("top_k", "redsync", "dragonn", "dragonn_a", "dgc"):
        options = PRESETS[preset]()
        results = on_threads(options, gradients)
        total = results[0].means[0]["w"] + sum(r.residual["w"] for r in results) / 3
        assert total[:3].tolist() == [60.0, 120.0, 180.0]
        sent_by_all = all(result.residual["w"][2] == 0 for result in results)
        assert sent_by_all
        assert results[0].means[0]["w"][2] == 180.0


@pytest.mark.parametrize("values", VALUES)
def test_bytes_on_the_wire_are_those_of_the_value_coding(values: str) -> None:
    """pytorch#63375: an f16 hook sent f32. A payload is 64 bytes, one word of gradient bits, 32 bytes for a section, 4
    bytes for each index, and 4 or 2 for each value or 4 for the shared one; blocks are multiples of 16 bytes."""
    n, k, world_size = 4096, 41, 3
    options = ReducerOptions(selector=TopK(0.01), codec=Codec("raw_u32", values), dense_below=0)
    results = on_threads(options, normal(world_size, 5, {"w": n}))
    bytes_of_values = {"f32": 4 * k, "bf16": 2 * k + 2, "f16": 2 * k + 2, "shared_mean": 4}[values]
    block = -(-(64 + 4 + 32 + 4 * k + bytes_of_values) // 16) * 16
    for result in results:
        last = result.stats[-1]
        assert last.calls == 1
        assert last.entries_sent == k
        assert last.bytes_sent == (world_size - 1) * block == last.bytes_received


@pytest.mark.parametrize("world_size", [2, 5, 16])
@pytest.mark.parametrize("preset", ["dense", "top_k"])
def test_the_error_of_a_mean_in_bf16_does_not_grow_with_the_ranks(preset: str, world_size: int) -> None:
    """pytorch#106395: reduction in bf16 was fine on 96 GPUs and unstable on 384."""
    options = thinwire.dense() if preset == "dense" else models.sparse(thinwire.top_k(1.0))
    gradients = normal(world_size, 1, {"w": 2000}, torch.bfloat16)
    for rank in gradients:
        rank[0]["w"] += 8  # partial sums in bf16 would lose most bits of an addend
    mean = on_threads(options, gradients)[0].means[0]["w"]
    exact = sum(rank[0]["w"].double() for rank in gradients) / world_size
    assert float((mean.double() / exact - 1).abs().max()) <= 2**-8


@pytest.mark.parametrize("preset", ["dense", "top_k"])
def test_means_of_f16_neither_overflow_nor_vanish(preset: str) -> None:
    """horovod#1699: the sum of f16 gradients overflowed; divided first, small ones vanished."""
    options = thinwire.dense() if preset == "dense" else models.sparse(thinwire.top_k(1.0))
    large, small = 60000.0, 2.0**-24
    w = torch.cat([torch.full((300,), large), torch.full((300,), small)]).half()
    mean = on_threads(options, [[{"w": w}]] * 8)[0].means[0]["w"]
    assert torch.equal(mean, w)


def test_small_tensors_are_left_alone() -> None:
    """pytorch#52034: tensors were compressed where it saved nothing."""
    for preset in (thinwire.top_k, thinwire.redsync, thinwire.redsync_quantized, thinwire.dragonn, thinwire.dgc):
        gradients = normal(2, 2, {"small": 10_239, "large": 10_240})
        results = on_threads(preset(), gradients)
        assert results[0].stats[-1].sparse_numel == 10_240
        assert not any(r.residual["small"].any() for r in results)
        assert all(r.residual["large"].any() for r in results)


def test_a_schedule_goes_on_where_it_was_after_a_restart() -> None:
    """grace#15: DGC's warm-up was missing."""
    n, steps = 1000, 9
    options = models.sparse(thinwire.top_k(0.001))
    options.schedule = thinwire.Schedule(dense_steps=2, ramp_steps=6, ramp_stages=3)
    expected = [1.0] * 2 + [0.178] * 2 + [0.032] * 2 + [0.006] * 2 + [0.001]  # 0.001^(1/4), ^(2/4), ^(3/4)
    gradients = normal(2, steps, {"w": n})
    whole = on_threads(options, gradients)
    assert [stats.density for stats in whole[0].stats] == expected

    def restarted(communicator: thinwire.Communicator) -> None:
        mine = gradients[communicator.rank()]
        state = None
        for step in range(steps):
            reducer = thinwire.Reducer(options, [("w", n)], communicator)
            if state:
                reducer.load(state["step"], state["residual"], state["velocity"], state["selection"])
            reducer.begin_step()
            mean = mine[step]["w"].clone()
            reducer.reduce([("w", n, True)], mean).wait()
            assert reducer.stats().density == expected[step]
            assert torch.equal(mean, whole[communicator.rank()].means[step]["w"])
            state = reducer.state()
            reducer.close()

    ranks.as_threads(thinwire.make_thread_communicators(2), restarted)


def zero_steps(rank: int, world_size: int, preset: str) -> None:
    """Steps without anything to say: nothing waits, then something waits, then all of it has been sent."""
    model = DistributedDataParallel(models.GivenGradients((20, 20), (7,)))
    handle = thinwire.ddp.attach(model, PRESETS[preset]())
    zero = [torch.zeros(20, 20), torch.zeros(7)]
    given = [torch.arange(400.0).view(20, 20) * (rank + 1), torch.ones(7)]
    sums = [torch.zeros(20, 20), torch.zeros(7)]
    for step in range(120):
        model.zero_grad()
        model(*(given if step == 2 else zero)).backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            total += p.grad
        if step < 2:
            assert not any(p.grad.any() for p in model.parameters())
            assert handle.stats().entries_sent == 0
    # Of 400 entries 4 travel in a step, or more: all of it has been given out.
    torch.testing.assert_close(sums, [torch.arange(400.0).view(20, 20) * (world_size + 1) / 2, torch.ones(7)])


@pytest.mark.parametrize("preset", ["top_k", "redsync", "dragonn", "dgc"])
def test_steps_with_a_gradient_of_zeros(preset: str) -> None:
    """pytorch#85234: gathering zero elements on Gloo ended the process."""
    ranks.run(2, zero_steps, preset)


def rate_drop(rank: int, world_size: int) -> None:
    means = []
    for factor in (1.0, 0.1):
        model = DistributedDataParallel(models.GivenGradients((20, 20)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
        generator = torch.Generator().manual_seed(rank)
        expected = torch.zeros(20, 20)
        seen = []
        for step in range(8):
            if step == 4:
                optimizer.param_groups[0]["lr"] *= factor
            optimizer.zero_grad()
            model(torch.randn(20, 20, generator=generator)).backward()
            optimizer.step()
            seen.append(model.module.w0.grad.clone())
            expected -= optimizer.param_groups[0]["lr"] * seen[-1]
        torch.testing.assert_close(model.module.w0.detach(), expected)
        means.append(torch.stack(seen))
    assert torch.equal(*means)


def test_residuals_are_gradients_whatever_the_learning_rate() -> None:
    """byteps#395: after a drop of the rate by 10 what waited was applied at the wrong rate, unless a file said so. Here
    it is applied at the rate of the step that sends it."""
    ranks.run(2, rate_drop)


def peak(rank: int, world_size: int) -> tuple[float, float]:
    """MiB of the gradient, and MiB by which the peak of three compressed steps lies above that of plain ones."""
    n = 9 << 20  # above 32 MiB, what malloc was given back leaves the process
    model = DistributedDataParallel(models.GivenGradients((n,)), gradient_as_bucket_view=True)
    gradient = torch.randn(n)

    def steps() -> float:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
        for _ in range(3):
            model(gradient).backward()
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    steps()
    before = steps()
    handle = thinwire.ddp.attach(model, thinwire.top_k(0.001))
    after = steps()
    assert handle.stats().active
    return n * 4 / 2**20, after - before


def test_compression_takes_the_memory_of_one_residual() -> None:
    """pytorch#45968: decompression doubled the peak of memory."""
    for gradient, more in ranks.run(2, peak):
        assert 0.9 * gradient <= more <= 1.5 * gradient


def test_a_residual_belongs_to_one_rank() -> None:
    """marian-dev#51, powersgd#3: the history of all clients was one."""
    gradients = normal(3, 3, {"w": 1000})
    for step in gradients[1]:
        step["w"].zero_()
    for preset in ("top_k", "redsync", "dragonn", "dgc"):
        results = on_threads(PRESETS[preset](), gradients)
        assert not results[1].residual["w"].any()
        assert results[0].residual["w"].any()
        assert not torch.equal(results[0].residual["w"], results[2].residual["w"])


def odd_world(rank: int, world_size: int) -> int:
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=20 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS["dragonn"](), optimizer)
    batches = models.Batches(rank)
    for _ in range(6):
        optimizer.zero_grad()
        models.loss_of(model, batches()).backward()
        optimizer.step()
    dist.barrier()
    assert handle.stats().active
    return models.checksum(list(model.parameters()))


@pytest.mark.parametrize("world_size", [5, 7])
def test_any_number_of_processes(world_size: int) -> None:
    """DeepSpeed#4886."""
    assert len(set(ranks.run(world_size, odd_world))) == 1
