"""When a rank dies, stalls or fails, every other rank gets one clear error, within the time-out."""

import functools
import io
import os
import signal
import time
from typing import Any

import models
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp
from thinwire.c10d import TorchCommunicator

TIMEOUT = 4.0  # seconds
FAULTY_RANK = 1
FAULT_STEP = 6
METHODS = ["top_k", "dense"]  # two kinds of exchange


class Fault(Exception):
    """Raised on one rank only."""


def options_of(method: str) -> thinwire.ReducerOptions:
    return thinwire.dense() if method == "dense" else models.METHODS[method]()


def train(rank: int, world_size: int, method: str, fault: str) -> dict:
    """Trains until an error comes; FAULTY_RANK has the fault. Returns the error and how long it took to come."""
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
    handle = thinwire.ddp.attach(model, options_of(method), timeout=TIMEOUT)
    batches = models.Batches(rank)
    if fault == "in a callback" and rank == FAULTY_RANK:
        model.module.layers[2].weight.register_hook(lambda grad: _at(handle, FAULT_STEP, "raise"))
    if fault == "in the forward pass" and rank == FAULTY_RANK:
        model.module.head.register_forward_pre_hook(lambda *_: _at(handle, FAULT_STEP - 1, "raise"))
    if fault == "inside the hook" and rank == FAULTY_RANK:
        handle._engine._names.pop(id(model.module.layers[2].weight))
    for step in range(FAULT_STEP + 20):
        if step == FAULT_STEP and rank == FAULTY_RANK:
            _fail(fault)
        before = models.state_of(handle)["residual"] if method == "top_k" else {}
        begin = time.monotonic()
        try:
            model.zero_grad()
            models.loss_of(model, batches()).backward()
        except thinwire.Error as error:
            seconds = time.monotonic() - begin
            with pytest.raises(thinwire.Error) as again:
                handle._engine.reducer.begin_step()
            after = _last_words(handle)
            return {
                "code": error.code.value,
                "sentence": str(error),
                "again": str(again.value),
                "seconds": seconds,
                "step": step,
                "unsent": not before or _unsent(before, after["residual"], model),
            }
        except Fault:
            if fault != "in the forward pass":
                raise
            _last_words(handle)
            time.sleep(TIMEOUT + 1)  # alive, but out of the loop
            raise
    raise AssertionError("no error came")


def _last_words(handle: thinwire.ddp.Handle) -> dict:
    """The state of a rank that ends: it can be saved, and the handle can be closed, which ends its thread."""
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    threads = len(os.listdir("/proc/self/task"))
    handle.close()
    handle.detach()
    assert len(os.listdir("/proc/self/task")) < threads
    return next(iter(saved.values()))


def _at(handle: thinwire.ddp.Handle, step: int, what: str) -> None:
    if handle.step == step:
        _fail(what)


def _fail(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stalled":
        time.sleep(TIMEOUT + 3)
    elif fault in ("exits", "raise"):
        raise Fault("on purpose")


def _unsent(before: dict, after: dict, model: nn.Module) -> bool:
    """Whether every residual holds what it held, plus the failed step's gradient where its bucket had come that far."""
    came_that_far = 0
    for name, p in model.module.named_parameters():
        if torch.equal(after[name], before[name] + p.grad.flatten()):
            came_that_far += 1
        elif not torch.equal(after[name], before[name]):
            return False
    return came_that_far > 0


def others(outcomes: list[ranks.Outcome]) -> list[dict]:
    for rank, outcome in enumerate(outcomes):
        if rank != FAULTY_RANK:
            assert outcome.error is None, outcome.trace
            assert outcome.status == 0
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank != FAULTY_RANK]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", ["killed", "exits", "in a callback"])
def test_a_rank_that_ends(method: str, fault: str) -> None:
    outcomes = ranks.observe(3, train, method, fault, limit=60)
    if fault == "killed":
        assert outcomes[FAULTY_RANK].status == -signal.SIGKILL
    else:
        assert isinstance(outcomes[FAULTY_RANK].error, Fault)
    for rank, result in zip((0, 2), others(outcomes), strict=True):
        assert result["code"] == "remote"
        assert result["sentence"] == result["again"]
        assert f"rank {rank} of 3 lost the connection to another rank in all_" in result["sentence"]
        assert result["seconds"] < 3
        assert result["step"] == FAULT_STEP
        assert result["unsent"]


@pytest.mark.parametrize(
    ("method", "fault"), [("top_k", "stalled"), ("dense", "stalled"), ("top_k", "in the forward pass")]
)
def test_a_rank_that_does_not_come(method: str, fault: str) -> None:
    """It lives and says nothing: the others wait for their time-out. One that comes too late gets an error as well."""
    outcomes = ranks.observe(3, train, method, fault, limit=60)
    results = others(outcomes)
    if fault == "stalled":
        assert outcomes[FAULTY_RANK].error is None, outcomes[FAULTY_RANK].trace
        results.append(outcomes[FAULTY_RANK].value)
    else:
        assert isinstance(outcomes[FAULTY_RANK].error, Fault)
    for result in results:
        assert result["code"] in ("timeout", "remote")  # remote: one that waited for a rank whose time was up
        assert result["seconds"] < TIMEOUT + 5
        assert result["step"] == FAULT_STEP
        assert result["sentence"] == result["again"]
        assert result["unsent"]
    assert any(
        "of 3 waited 4." in r["sentence"] and "for the other ranks, and not all of them came" in r["sentence"]
        for r in results
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_whose_hook_fails(method: str) -> None:
    """It lives, so every rank gets its reason in the same step."""
    outcomes = ranks.observe(3, train, method, "inside the hook", limit=60)
    results = [outcome.value for outcome in outcomes]
    assert all(outcome.status == 0 for outcome in outcomes), [outcome.trace for outcome in outcomes]
    for result in results:
        assert result["step"] == 0
        assert f"rank {FAULTY_RANK}" in result["sentence"]
        assert "a parameter of shape (64, 64) in bucket 0 is not among the named parameters" in result["sentence"]


class Line(TorchCommunicator):
    """Flips a bit of one block on its way: of the one that this rank sends, or of the one it gets from rank 0."""

    flips = -1  # the byte; -1: none
    sends = False

    def all_gather(self, block: Any, blocks: Any) -> None:
        at, Line.flips = Line.flips, -1
        sent = torch.from_dlpack(block).clone()
        if at >= 0 and Line.sends:
            sent[at] ^= 4
        super().all_gather(sent, blocks)
        if at >= 0 and not Line.sends:
            torch.from_dlpack(blocks)[at] ^= 4


def corrupted(rank: int, world_size: int, where: str, at: int, step_at: int, bucket_cap: float) -> dict:
    """Trains until an error comes; what FAULTY_RANK sends or gets in step `step_at` is damaged in byte `at`, if any."""
    thinwire._handle.TorchCommunicator = Line
    torch.manual_seed(3)
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=bucket_cap)
    handle = thinwire.ddp.attach(model, models.METHODS["top_k"](), timeout=TIMEOUT)
    batches = models.Batches(rank)
    Line.sends = where == "sent"
    result: dict = {"means": []}
    for step in range(FAULT_STEP + 2):
        if step == step_at and rank == FAULTY_RANK:
            Line.flips = at
        before = models.state_of(handle)["residual"]
        begin = time.monotonic()
        try:
            model.zero_grad()
            models.loss_of(model, batches()).backward()
            result["means"].append(models.checksum([p.grad for p in model.parameters()]))
        except thinwire.Error as error:
            result.update(code=error.code.value, sentence=str(error), seconds=time.monotonic() - begin, step=step)
            result["unsent"] = _unsent(before, _last_words(handle)["residual"], model)
            break
    return result


DAMAGES = {  # where, which byte, in which step, the cap of buckets; the last step that the others finish
    "header, sent": ("sent", 20, FAULT_STEP, 8 * models.KB, FAULT_STEP - 1),
    "entries, sent": ("sent", 90, FAULT_STEP, 8 * models.KB, FAULT_STEP - 1),
    "header, received": ("received", 20, FAULT_STEP, 8 * models.KB, FAULT_STEP - 1),
    "entries, received": ("received", 90, FAULT_STEP, 8 * models.KB, FAULT_STEP - 1),
    "the last bucket of a step": ("received", 90, FAULT_STEP, 25, FAULT_STEP),
    "sizes of new buckets": ("received", 20, 1, 8 * models.KB, 0),
}


@functools.cache
def undisturbed_means(cap: float) -> list[int]:
    means = [result["means"] for result in ranks.run(3, corrupted, "sent", -1, FAULT_STEP, cap)]
    assert means[0] == means[1] == means[2]
    assert len(means[0]) == FAULT_STEP + 2
    return means[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_bytes_that_are_damaged_on_their_way(damage: str) -> None:
    """Every rank gets an error in that step or the next one, and no mean is wrong."""
    *where, cap, last = DAMAGES[damage]
    outcomes = ranks.observe(3, corrupted, *where, cap, limit=60)
    assert [outcome.status for outcome in outcomes] == [0, 0, 0], [outcome.trace for outcome in outcomes]
    undisturbed = undisturbed_means(cap)
    for rank, outcome in enumerate(outcomes):
        result = outcome.value
        finished = min(last, where[2] - 1) if rank == FAULTY_RANK else last
        assert result["means"] == undisturbed[: finished + 1]
        assert result["step"] == finished + 1
        assert result["seconds"] < TIMEOUT + 5
        assert result["unsent"]
        if where[0] == "sent" or rank == FAULTY_RANK:
            assert result["code"] == "corrupt_payload"
            assert f"from rank {0 if where[0] == 'received' else FAULTY_RANK}: payload refused" in result["sentence"]
        else:
            assert result["code"] in ("remote", "timeout")


def differ(rank: int, world_size: int, what: str) -> str:
    options = models.METHODS["top_k"]()
    model = DistributedDataParallel(models.Mlp())
    parameters = list(model.module.named_parameters())
    if rank == 1 and what == "options":
        options.seed = 5
    if rank == 1 and what == "names":
        parameters[0] = ("other", parameters[0][1])
    model.register_comm_hook(thinwire.ddp.HookState(options, parameters, timeout=TIMEOUT), thinwire.ddp.hook)
    with pytest.raises(thinwire.Error) as caught:
        models.loss_of(model, models.Batches(rank)()).backward()
    return str(caught.value)


@pytest.mark.parametrize(("what", "word"), [("options", "seed"), ("names", "other")])
def test_differing_ranks_are_told_in_words(what: str, word: str) -> None:
    for sentence in ranks.run(3, differ, what):
        assert word in sentence
        assert "rank" in sentence


def test_a_rank_that_does_not_attach() -> None:
    outcomes = ranks.observe(2, attach_alone, limit=60)
    assert outcomes[0].error is None, outcomes[0].trace
    assert outcomes[0].value[0] in ("timeout", "remote")
    assert "rank 0 of 2" in outcomes[0].value[1]
    assert outcomes[0].value[2] < TIMEOUT + 5


def attach_alone(rank: int, world_size: int) -> tuple[str, str, float] | None:
    model = DistributedDataParallel(models.Mlp())
    if rank == 1:
        time.sleep(TIMEOUT + 3)
        return None
    begin = time.monotonic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(thinwire.Error) as caught:
        thinwire.ddp.attach(model, thinwire.redsync(), optimizer, timeout=TIMEOUT)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    return caught.value.code.value, str(caught.value), time.monotonic() - begin
