"""handle.report(), handle.trace() and check_replicas_every: seeing what happens."""

import json
import shutil
from pathlib import Path

import models
import pytest
import ranks
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


def make(rank: int, options: thinwire.ReducerOptions, **arguments: int) -> tuple:
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, options, optimizer, **arguments)
    batches = models.Batches(rank)

    def step() -> None:
        optimizer.zero_grad()
        models.loss_of(model, batches()).backward()
        optimizer.step()

    return model, handle, step


def reported(rank: int, world_size: int) -> list[str]:
    options = models.METHODS["redsync"]()
    options.schedule = thinwire.Schedule(dense_steps=2)
    _, handle, step = make(rank, options)
    reports = []
    for _ in range(52):
        step()
        reports.append(handle.report())
    return reports


def test_a_report_says_what_was_sent_and_why() -> None:
    reports = ranks.run(2, reported)[0]
    assert reports[0].startswith("step 0: dense, dense warm-up until step 2\nsent      ")
    assert "times less than dense" not in reports[1]
    last = reports[-1].splitlines()
    assert last[0].startswith("step 51: sparse, ")
    assert "elements of the compressed parameters were sent" in last[0]
    assert "times less than dense f32, in " in last[1]
    assert last[2] == "density   0.996% of the compressed parameters"
    assert last[3].startswith("residual  ")
    assert "at step 50" in last[3]
    assert last[-1].startswith("time      select ")


def traced(rank: int, world_size: int, folder: str) -> int:
    _, handle, step = make(rank, models.METHODS["top_k"]())
    step()
    with handle.trace(f"{folder}/trace.json") as trace:
        for _ in range(3):
            step()
        with pytest.raises(thinwire.Error, match="a trace is running already"):
            handle.trace(f"{folder}/other.json")
    trace.stop()
    step()
    every = handle.trace(f"{folder}/trace-{{rank}}.json")
    step()
    every.stop()
    handle.trace(f"{folder}/last.json")
    step()
    handle.detach()
    return handle is not None


def test_a_trace_shows_every_bucket_against_the_backward_pass(tmp_path: Path) -> None:
    ranks.run(2, traced, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.json", "trace-0.json", "trace-1.json", "trace.json",
    ]  # fmt: skip
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans} == {1, 2, 3}
    assert {"training loop", "bucket 0", "bucket 1"} <= set(rows.values())
    for step in (1, 2, 3):
        of_step = [(rows[e["tid"]], e) for e in spans if e["args"]["step"] == step]
        loop = {e["name"]: e for row, e in of_step if row == "training loop"}
        assert set(loop) == {"backward pass", "wait for the means", "optimizer step"}
        first = {e["name"]: e for row, e in of_step if row == "bucket 0"}
        assert {"queued", "accumulate and select", "encode", "exchange", "decode"} <= set(first)
        assert loop["backward pass"]["ts"] < first["queued"]["ts"]
        assert first["decode"]["ts"] < loop["optimizer step"]["ts"]
    assert json.loads((tmp_path / "last.json").read_text())["traceEvents"]


def unwritable(rank: int, world_size: int, folder: str) -> None:
    """A trace that cannot be written is an error, and everything else of detach is done."""
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    with pytest.raises(IsADirectoryError):
        handle.trace(folder)
    gone = Path(folder, "gone")
    gone.mkdir()
    handle.trace(gone / "trace.json")
    models.loss_of(model, models.Batches(rank)()).backward()
    optimizer.step()
    shutil.rmtree(gone)
    with pytest.raises(FileNotFoundError):
        handle.detach()
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"]) == (0.9, 0.01)
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())
    handle.detach()


def test_a_trace_that_cannot_be_written_does_not_keep_the_momentum(tmp_path: Path) -> None:
    ranks.run(1, unwritable, str(tmp_path))


def strayed(rank: int, world_size: int) -> None:
    model, _, step = make(rank, models.METHODS["top_k"](), check_replicas_every=3)
    for _ in range(5):
        step()
    if rank == 1:
        with torch.no_grad():
            model.module.head.bias += 1e-3
    with pytest.raises(thinwire.Error, match=r"the replicas differ: parameter 'head\.bias' of rank 1 is not"):
        step()


def test_replicas_that_differ_are_noticed() -> None:
    ranks.run(3, strayed)


def test_checking_replicas_needs_an_optimizer_and_a_number_of_steps() -> None:
    def attach(rank: int, world_size: int) -> None:
        model = DistributedDataParallel(models.Mlp())
        with pytest.raises(thinwire.Error, match="give optimizer"):
            thinwire.ddp.attach(model, thinwire.top_k(), check_replicas_every=1)
        for odd in (-1, 2.5, None, "a"):
            with pytest.raises(thinwire.Error, match="expected a number of steps"):
                thinwire.ddp.attach(model, thinwire.top_k(), check_replicas_every=odd)

    ranks.run(1, attach)
