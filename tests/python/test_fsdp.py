"""FSDP2: what thinwire does between replicas equals what HSDP does, or is sparse and loses nothing."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import thinwire.fsdp

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"):
    pytest.skip("this torch has no all-reduce hook of FSDP2", allow_module_level=True)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402

SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


class Odd(nn.Module):
    """[b, 32] -> [b, 1] through sizes that neither 2 nor 3 shards divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, 49)
        self.second = nn.Linear(49, 31)
        self.head = nn.Linear(31, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


def sparse(density: float = 0.05) -> thinwire.ReducerOptions:
    options = thinwire.redsync(density)
    options.dense_below = 64
    return options


def mesh_of(shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def make(
    mesh: DeviceMesh, network: Callable[[], nn.Module] = Odd, policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """The network, its linear layers and its root sharded over `mesh`."""
    torch.manual_seed(3)
    model = network()
    kwargs = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    if network is Odd:
        for layer in (model.first, model.second):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def train(model: nn.Module, optimizer: Optimizer, batches: models.Batches, steps: int, micro: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for i in range(micro):
            model.set_requires_gradient_sync(i == micro - 1)
            loss = models.loss_of(model, batches())
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def shards_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().to_local() for p in model.parameters()]


def difference(a: nn.Module, b: nn.Module) -> float:
    return float((whole(a) - whole(b)).norm() / whole(b).norm())


def gathered(value: object, mesh: DeviceMesh) -> list:
    values = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values


def failure(function: Callable[[], object]) -> str:
    """The words of what it raises, or nothing."""
    try:
        function()
    except thinwire.Error as error:
        return str(error)
    return ""


SGD_RUNS = [("SGD", SGD, 1), ("SGD", SGD, 3)]  # optimizer, its settings, backward passes per step
RUNS = [*SGD_RUNS, ("SGD", {"weight_decay": 0.01}, 1), ("AdamW", {"lr": 0.01}, 1)]


def dense(rank: int, world_size: int, shards: int, runs: list[tuple[str, dict[str, float], int]]) -> list[float]:
    mesh, differences = mesh_of(shards), []
    for kind, settings, micro in runs:
        ours, plain = make(mesh["shard"]), make(mesh)
        mine, theirs = (getattr(torch.optim, kind)(m.parameters(), **{"lr": 0.05, **settings}) for m in (ours, plain))
        handle = thinwire.fsdp.attach(ours, thinwire.dense(), mine, replicate_group=mesh["replicate"])
        train(ours, mine, models.Batches(rank), 4, micro)
        train(plain, theirs, models.Batches(rank), 4, micro)
        differences.append(difference(ours, plain))
        assert handle.stats().step == 3
        assert handle.stats().jobs == 3
    return differences


@pytest.mark.parametrize(("world_size", "shards", "runs"), [(4, 2, RUNS), (6, 3, SGD_RUNS[1:])])
def test_dense_equals_hsdp(world_size: int, shards: int, runs: list) -> None:
    for differences in ranks.run(world_size, dense, shards, runs):
        assert max(differences) <= 1e-6, differences


def reduce_dtypes(rank: int, world_size: int) -> dict[torch.dtype, float]:
    mesh, results = mesh_of(3), {}
    for dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        ours, plain = make(mesh["shard"], policy=policy), make(mesh, policy=policy)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, plain)]
        before = whole(ours)
        thinwire.fsdp.attach(ours, thinwire.dense(), optimizers[0], replicate_group=mesh["replicate"])
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            train(model, optimizer, models.Batches(rank), 6)
        results[dtype] = float((whole(ours) - whole(plain)).norm() / (whole(plain) - before).norm())
    return results


def test_reduce_dtypes_of_a_mixed_precision_policy() -> None:
    for results in ranks.run(6, reduce_dtypes):
        assert results[torch.bfloat16] < 2**-6
        assert results[torch.float16] < 2**-9


def sparsely(rank: int, world_size: int) -> None:
    mesh = mesh_of(2)
    model = make(mesh["shard"], models.Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = thinwire.fsdp.attach(model, sparse(), optimizer, replicate_group=mesh["replicate"])
    losses = train(model, optimizer, models.Batches(rank, 64), 60)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    stats = handle.stats()
    assert stats.active
    assert 0 < stats.bytes_sent < stats.dense_bytes / 2
    assert len(set(gathered(models.checksum(shards_of(model)), mesh["replicate"]))) == 1
    assert "sparse" in handle.report()


def test_sparse_replicas_are_equal_bit_for_bit() -> None:
    ranks.run(4, sparsely)


def conservation(rank: int, world_size: int) -> None:
    mesh = mesh_of(3)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 3e-3)):
        conserves(mesh, models.Batches(rank), dtype, tolerance)


def conserves(mesh: DeviceMesh, batches: models.Batches, dtype: torch.dtype, tolerance: float) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    ours, plain = make(mesh["shard"], policy=policy), make(mesh, policy=policy)
    handle = thinwire.fsdp.attach(ours, sparse(), replicate_group=mesh["replicate"])
    sent, whole_gradient = ([torch.zeros_like(p) for p in shards_of(model)] for model in (ours, plain))
    for _ in range(8):  # the parameters stay as they are
        batch = batches()
        for model, total in ((ours, sent), (plain, whole_gradient)):
            model.zero_grad()
            models.loss_of(model, batch).backward()
            for part, p in zip(total, model.parameters(), strict=True):
                part += p.grad.to_local()
    assert handle.stats().active
    assert len(set(gathered(models.checksum(sent), mesh["replicate"]))) == 1
    residuals = models.state_of(handle)["residual"]
    handle.flush()
    for (name, p), part, expected in zip(ours.named_parameters(), sent, whole_gradient, strict=True):
        waiting, numel = residuals[name], part.numel()
        assert not waiting[numel:].any()  # padding
        dist.all_reduce(waiting, group=mesh["replicate"].get_group())
        waiting /= mesh["replicate"].size()
        torch.testing.assert_close(p.grad.to_local().flatten(), waiting[:numel])
        if numel > 0:
            error = part.flatten() + waiting[:numel] - expected.flatten()
            assert error.abs().max() <= tolerance * expected.abs().max()
        assert not models.state_of(handle)["residual"][name].any()
    assert any(residual.any() for residual in residuals.values())


def test_what_is_sent_and_what_waits_is_the_whole_gradient() -> None:
    ranks.run(6, conservation)


def accumulation(rank: int, world_size: int) -> str:
    mesh = mesh_of(2)
    model = make(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.fsdp.attach(model, sparse(), optimizer, replicate_group=mesh["replicate"])
    train(model, optimizer, models.Batches(rank), 3, micro=4)
    assert handle.stats().step == 2  # a window is one step
    return failure(lambda: models.loss_of(model, models.Batches(rank)()).backward())  # on top of what has been reduced


def test_accumulation() -> None:
    for error in ranks.run(4, accumulation):
        assert "has a gradient already" in error
        assert "set_requires_gradient_sync(False)" in error


def several_passes(rank: int, world_size: int) -> None:
    """Without momentum the means of several passes add up, as they do in HSDP."""
    mesh = mesh_of(2)
    ours, plain = make(mesh["shard"]), make(mesh)
    handle = thinwire.fsdp.attach(ours, thinwire.dense(), replicate_group=mesh["replicate"])
    for model in (ours, plain):
        batches = models.Batches(rank)
        x, y = batches()
        (model(x).sum() + model(2 * x).square().mean()).backward()  # two calls in one pass
        loss = models.loss_of(model, (x, y))
        loss.backward(retain_graph=True)
        models.loss_of(model, batches()).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-5, atol=1e-6)
    assert handle.step >= 2


def test_passes_that_reduce_without_an_optimizer_step_add_up() -> None:
    ranks.run(4, several_passes)


def unused(rank: int, world_size: int) -> None:
    mesh = mesh_of(2)
    ours, plain = make(mesh["shard"], models.Branches), make(mesh, models.Branches)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9) for model in (ours, plain)]
    handle = thinwire.fsdp.attach(ours, thinwire.dense(), optimizers[0], replicate_group=mesh["replicate"])
    for step in range(6):
        batch = models.Batches(rank)()
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            models.loss_of(model, batch, step % 2).backward()
            optimizer.step()
    assert handle.stats().step == 5
    assert difference(ours, plain) <= 1e-6

    handle.detach()
    handle = thinwire.fsdp.attach(ours, sparse(), optimizers[0], replicate_group=mesh["replicate"])
    for branch in (0, 0, 1):
        before = models.state_of(handle)["residual"]
        optimizers[0].zero_grad()
        models.loss_of(ours, models.Batches(rank)(), branch).backward()
        optimizers[0].step()
    after = models.state_of(handle)["residual"]
    assert set(after) == {name for name, _ in models.Branches().named_parameters()}
    kept = {name for name in after if torch.equal(after[name], before[name]) and after[name].any()}
    assert kept == {"branches.0.weight"}
    assert not any(after[f"{name}.weight"].any() for name in ("never", "branches.2"))


def test_unused_parameters_keep_their_residuals() -> None:
    ranks.run(4, unused)


def detached(rank: int, world_size: int) -> None:
    mesh = mesh_of(2)
    ours, plain = make(mesh["shard"]), make(mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, **SGD) for model in (ours, plain)]
    batches = [models.Batches(rank) for _ in optimizers]
    train(ours, optimizers[0], batches[0], 2)  # replicas that are not reduced yet
    train(plain, optimizers[1], batches[1], 2)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        mine.data.to_local().copy_(theirs.data.to_local())
        momentum = optimizers[1].state[theirs]["momentum_buffer"].to_local()
        optimizers[0].state[mine]["momentum_buffer"].to_local().copy_(momentum)
    handle = thinwire.fsdp.attach(ours, thinwire.dense(), optimizers[0], replicate_group=mesh["replicate"])
    for model, optimizer, source in zip((ours, plain), optimizers, batches, strict=True):
        train(model, optimizer, source, 3)
    assert optimizers[0].param_groups[0]["momentum"] == 0
    handle.detach()
    assert optimizers[0].param_groups[0]["momentum"] == 0.9
    for model, optimizer, source in zip((ours, plain), optimizers, batches, strict=True):
        train(model, optimizer, source, 3)
    assert difference(ours, plain) <= 1e-6
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        momenta = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (mine, theirs), strict=True)]
        torch.testing.assert_close(momenta[0].full_tensor(), momenta[1].full_tensor(), rtol=1e-4, atol=1e-6)
    again = thinwire.fsdp.attach(ours, thinwire.dense(), optimizers[0], replicate_group=mesh["replicate"])
    assert again is handle
    for model, optimizer, source in zip((ours, plain), optimizers, batches, strict=True):
        train(model, optimizer, source, 3)
    assert difference(ours, plain) <= 1e-6


def test_after_detach_replicas_are_averaged_densely() -> None:
    ranks.run(4, detached)


def resume(rank: int, world_size: int) -> None:
    mesh, batches = mesh_of(2), models.Batches(rank)

    def start() -> tuple[nn.Module, Optimizer]:
        model = make(mesh["shard"])
        return model, torch.optim.SGD(model.parameters(), lr=0.02, **SGD)

    model, optimizer = start()
    handle = thinwire.fsdp.attach(model, sparse(), optimizer, replicate_group=mesh["replicate"])
    train(model, optimizer, batches, 10)
    state = {"model": shards_of(model), "optimizer": optimizer.state_dict(), "thinwire": handle.state_dict()}
    file = io.BytesIO()
    torch.save(state, file)
    rest = [batches() for _ in range(10)]
    train(model, optimizer, iter(rest).__next__, 10)
    uninterrupted = models.checksum(shards_of(model))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = start()
    for p, values in zip(model.parameters(), saved["model"], strict=True):
        p.data.to_local().copy_(values)
    optimizer.load_state_dict(saved["optimizer"])
    handle = thinwire.fsdp.attach(
        torch.compile(model, backend="eager"), sparse(), optimizer, replicate_group=mesh["replicate"]
    )
    neighbour = gathered(saved["thinwire"], mesh["shard"])[1 - mesh["shard"].get_local_rank()]
    assert "each rank saves and loads its own" in failure(lambda: handle.load_state_dict(neighbour))
    handle.load_state_dict(saved["thinwire"])
    train(model, optimizer, iter(rest).__next__, 10)
    assert models.checksum(shards_of(model)) == uninterrupted


def test_resumed_run_equals_uninterrupted_run_bit_for_bit() -> None:
    ranks.run(4, resume)


def refusals(rank: int, world_size: int) -> dict[str, str]:
    mesh = mesh_of(2)

    def attach(model: nn.Module, options: thinwire.ReducerOptions | None = None, group: object = None) -> str:
        return failure(
            lambda: thinwire.fsdp.attach(
                model, thinwire.redsync() if options is None else options, replicate_group=group or mesh["replicate"]
            )
        )

    hooked = make(mesh["shard"])
    hooked.set_all_reduce_hook(lambda gradient: None)
    clipped = thinwire.redsync()
    clipped.clip_norm = 1.0
    diagonal = [dist.new_group(members) for members in ([0, 3], [1, 2])][rank in (1, 2)]
    attached = make(mesh["shard"])
    assert attach(attached) == ""
    words = {
        "native": attach(make(mesh)),
        "not sharded": attach(Odd()),
        "shard group": attach(make(mesh["shard"]), group=mesh["shard"]),
        "world": attach(make(mesh["shard"]), group=dist.group.WORLD),
        "2-D group": attach(make(mesh["shard"]), group=mesh),
        "diagonal": attach(make(mesh["shard"]), group=diagonal),
        "hook": attach(hooked),
        "clip": attach(make(mesh["shard"]), clipped),
        "twice": attach(attached),
        "options": attach(make(mesh["shard"]), {}),
    }
    hook = FSDPModule.set_all_reduce_hook
    del FSDPModule.set_all_reduce_hook
    words["old torch"] = attach(make(mesh["shard"]))
    FSDPModule.set_all_reduce_hook = hook
    return words


def test_what_cannot_work_is_refused_in_a_sentence() -> None:
    expected = {
        "native": 'use fully_shard(module, mesh=mesh["shard"])',
        "not sharded": "no FSDP2 module",
        "shard group": "holds another shard",
        "world": "holds another shard",
        "2-D group": "mesh of 2 dimensions",
        "diagonal": "rank 1 of replicate_group holds shard",
        "hook": "all-reduce hook already",
        "clip": "clip_grad_norm_",
        "twice": "attached already",
        "options": "expected ReducerOptions",
        "old torch": "use torch 2.",
    }
    for words in ranks.run(4, refusals):
        assert {key: expected[key] in sentence for key, sentence in words.items()} == dict.fromkeys(expected, True), (
            words
        )


def differing(rank: int, world_size: int) -> str:
    """One replica trains a parameter that was frozen when thinwire was attached."""
    mesh = mesh_of(2)
    torch.manual_seed(3)
    model = Odd()
    model.head.bias.requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    thinwire.fsdp.attach(model, sparse(), optimizer, replicate_group=mesh["replicate"], timeout=20)
    if mesh["replicate"].get_local_rank() == 1:
        model.head.bias.requires_grad_(True)
    return failure(lambda: train(model, optimizer, models.Batches(rank), 1))


def test_a_replica_whose_hook_fails_is_named_everywhere() -> None:
    for error in ranks.run(4, differing):
        assert "detach() before parameters are released" in error
        assert "rank 1" in error


def dies(rank: int, world_size: int) -> str:
    mesh = mesh_of(2)
    model = make(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    thinwire.fsdp.attach(model, sparse(), optimizer, replicate_group=mesh["replicate"], timeout=20)
    train(model, optimizer, models.Batches(rank), 3)
    if rank == 2:
        model.head.register_full_backward_pre_hook(lambda *_: os._exit(7))
    train(model, optimizer, models.Batches(rank), 1)
    return ""


def test_a_rank_that_dies() -> None:
    outcomes = ranks.observe(4, dies, limit=60)
    assert [outcome.status for outcome in outcomes] == [1, 1, 7, 1]
    assert isinstance(outcomes[0].error, thinwire.Error)  # the other replica of its shard
    assert outcomes[0].error.code in ("remote", "timeout")


def example(rank: int, world_size: int, port: int) -> str:
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    sys.argv[1:] = ["--steps", "8"]
    import fsdp_train

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        fsdp_train.main()
    return output.getvalue()


def test_example() -> None:
    printed = ranks.run(4, example, ranks.free_port())
    assert printed[0].startswith("step 8: loss ")
    assert "times less than dense" in printed[0]
    assert printed[1:] == ["", "", ""]
