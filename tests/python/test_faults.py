"""When a rank dies, stalls or fails, every other rank gets one clear error, within the time-out."""

import os
import signal
import time

import models
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

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
            after = models.state_of(handle)["residual"]
            return {
                "code": error.code.value,
                "sentence": str(error),
                "again": str(again.value),
                "seconds": seconds,
                "step": step,
                "unsent": not before or _unsent(before, after, model),
            }
    raise AssertionError("no error came")


def _at(handle: thinwire.ddp.Handle, step: int, what: str) -> None:
    if handle.step == step:
        _fail(what)


def _fail(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stalled":
        time.sleep(TIMEOUT + 3)
        os._exit(7)
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


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_stalls(method: str) -> None:
    outcomes = ranks.observe(3, train, method, "stalled", limit=60)
    results = others(outcomes)
    for result in results:
        assert result["code"] in ("timeout", "remote")  # remote: one that waited for a rank whose time was up
        assert result["seconds"] < TIMEOUT + 5
        assert result["step"] == FAULT_STEP
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
