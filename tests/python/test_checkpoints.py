"""Checkpoints: a resumed run is the run that was not interrupted, other numbers of ranks, DCP, what is refused."""

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp

RANKS = 3
SAVED_AT = 13  # inside of a ramp, and between two searches of ThresholdSearch
STEPS = 22


def with_options(method: str, **changes: Any) -> Callable[[], thinwire.ReducerOptions]:
    def make() -> thinwire.ReducerOptions:
        options = models.METHODS[method]() if method in models.METHODS else thinwire.dense()
        for name, value in changes.items():
            setattr(options, name, value)
        return options

    return make


@dataclass
class Case:
    """One way to train."""

    options: Callable[[], thinwire.ReducerOptions]
    ddp: dict[str, Any]
    adam: bool = False
    passes: int = 1  # backward passes of a step, all but the last under no_sync
    warm_up: int = 0  # backward passes before a checkpoint is loaded


RAMP = thinwire.Schedule(dense_steps=4, ramp_steps=16, ramp_stages=4)
CASES = {
    "redsync": Case(with_options("redsync"), {}),
    "dragonn, find_unused": Case(with_options("dragonn"), {"find_unused_parameters": True}),
    "quantized, bucket_view": Case(with_options("redsync_quantized"), {"gradient_as_bucket_view": True}),
    "reused threshold, static_graph": Case(with_options("threshold_search"), {"static_graph": True}, adam=True),
    "reused threshold, no_sync": Case(with_options("threshold_search"), {}, passes=2),
    "ramp": Case(with_options("dgc", schedule=RAMP), {}),
    "ramp, adam": Case(with_options("redsync", schedule=RAMP), {}, adam=True),
    "whole buckets, find_unused": Case(with_options("top_k"), {"find_unused_parameters": True}),
    "whole buckets, warm-up": Case(with_options("top_k"), {}, warm_up=1),
    "whole buckets, static_graph, warm-up": Case(with_options("top_k"), {"static_graph": True}, warm_up=2),
    "dense, warm-up": Case(with_options("dense"), {}, warm_up=1),
    "clipped, warm-up": Case(with_options("redsync", clip_norm=0.05), {}, warm_up=1),
}


class Run:
    """A model in training on one rank."""

    def __init__(self, rank: int, case: Case, saved: dict | None = None, timeout: float | None = None) -> None:
        torch.manual_seed(4)
        finds_unused = "find_unused_parameters" in case.ddp
        self.case, self.network = case, models.Branches() if finds_unused else models.Mlp()
        self.model = DistributedDataParallel(self.network, bucket_cap_mb=8 * models.KB, **case.ddp)
        if case.adam:
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        else:
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
            )
        self.batches, self.step = models.Batches(rank), 0
        if saved is not None:
            self._load_model(saved)
        self.handle = thinwire.ddp.attach(self.model, case.options(), self.optimizer, timeout=timeout)
        if saved is not None:
            self.handle.load_state_dict(saved["thinwire"])

    def _load_model(self, saved: dict) -> None:
        for _ in range(self.case.warm_up):
            self.model(torch.zeros(4, models.FEATURES)).sum().backward()
        self.optimizer.zero_grad()
        self.network.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])  # which says that momentum has been taken from it
        for _ in range(saved["step"] * self.case.passes):
            self.batches()
        self.step = saved["step"]

    def train(self, until: int) -> None:
        while self.step < until:
            self.step += 1
            self.optimizer.zero_grad()
            for passes in range(self.case.passes, 0, -1):
                branch = (self.step % 3,) if isinstance(self.network, models.Branches) else ()
                with self.model.no_sync() if passes > 1 else nullcontext():
                    models.loss_of(self.model, self.batches(), *branch).backward()
            self.optimizer.step()

    def loss(self) -> float:
        """On examples that are not trained on, the same on every rank."""
        with torch.no_grad():
            return float(models.loss_of(self.network, models.Batches(99, 256)()))

    def save(self, path: Path) -> None:
        state = {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "thinwire": self.handle.state_dict(),
            "step": self.step,
        }
        torch.save(state, path)

    def checksum(self) -> int:
        state = models.state_of(self.handle)
        tensors = [*self.network.parameters(), *(t for s in state["sections"] for t in state[s].values())]
        return models.checksum(tensors)


def file_of(folder: Path, rank: int, case: str = "") -> Path:
    return folder / f"{case}.{rank}.pt"


def uninterrupted(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """Checksums of parameters and state by case, with a checkpoint of each on the way."""
    result = {}
    for name, case in CASES.items():
        run = Run(rank, case)
        run.train(SAVED_AT)
        run.save(file_of(folder, rank, name))
        run.train(STEPS)
        result[name] = run.checksum()
    return result


def resumed(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """The same, from the checkpoints on."""
    result = {}
    for name, case in CASES.items():
        run = Run(rank, case, torch.load(file_of(folder, rank, name), weights_only=True))
        assert run.handle.step == SAVED_AT
        run.train(STEPS)
        assert run.handle.stats().active == (name != "dense, warm-up")
        result[name] = run.checksum()
    return result


@pytest.fixture(scope="module")
def checksums(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list]:
    folder = tmp_path_factory.mktemp("resume")
    return ranks.run(RANKS, uninterrupted, folder), ranks.run(RANKS, resumed, folder)


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(checksums: tuple[list, list], case: str) -> None:
    expected, got = ([rank[case] for rank in each] for each in checksums)
    assert got == expected
    assert len(set(got)) == RANKS  # the residuals differ between ranks


SGD = Case(with_options("threshold_search"), {})  # with selection memory, momentum and weight decay


def flat(state: dict) -> dict[str, Any]:
    """A rank's state with one entry for each tensor or value."""
    return {
        f"{section}.{name}": value
        for section, content in next(iter(state.values())).items()
        for name, value in (content.items() if isinstance(content, dict) else [("", content)])
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key] for key, value in a.items()
    )


def through_dcp(rank: int, world_size: int, folder: Path) -> None:
    assert issubclass(thinwire.ddp.Handle, Stateful)
    run = Run(rank, SGD)
    run.train(SAVED_AT)
    saved = flat(run.handle.state_dict())
    sections = ["residual", "velocity", "decay_momentum"]
    assert saved["sections."] == sections
    assert all(saved[f"{section}.head.bias"].any() for section in sections[1:])
    assert saved["selection."]
    dcp.save({"model": run.network, "thinwire": run.handle}, checkpoint_id=folder / "dcp")

    fresh = Run(rank, SGD)
    dcp.load({"model": fresh.network, "thinwire": fresh.handle}, checkpoint_id=folder / "dcp")
    assert same(flat(fresh.handle.state_dict()), saved)

    # What does not pass through the handle goes the same way.
    fresh = Run(rank, SGD)
    state = {"thinwire": fresh.handle.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    fresh.handle.load_state_dict(state["thinwire"])
    assert same(flat(fresh.handle.state_dict()), saved)

    # As one file, which has the states of all ranks side by side.
    if rank == 0:
        dcp_to_torch_save(folder / "dcp", folder / "whole.pt")
    dist.barrier()
    whole = torch.load(folder / "whole.pt", weights_only=True)["thinwire"]
    assert set(whole) == {f"rank_{r}_of_{world_size}" for r in range(world_size)}
    fresh = Run(rank, SGD)
    fresh.handle.load_state_dict(whole)
    assert same(flat(fresh.handle.state_dict()), saved)
    again = thinwire.ddp.reshard([whole], world_size)
    assert same(flat(again[rank]), saved)
    assert len(thinwire.ddp.reshard(whole, world_size + 1)) == world_size + 1


def test_distributed_checkpoint_keeps_the_ranks_apart(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks.run(2, through_dcp, tmp_path)


def before(rank: int, world_size: int, folder: Path) -> None:
    """Trains, saves, and saves what a flush would have given."""
    run = Run(rank, SGD)
    run.train(SAVED_AT)
    run.save(file_of(folder, rank))
    run.handle.flush()
    if rank == 0:
        torch.save({name: p.grad for name, p in run.network.named_parameters()}, folder / "flush")


def after(rank: int, world_size: int, folder: Path, conserve: str) -> tuple[int, float, float]:
    """Goes on with another number of ranks; checksum of the parameters, and the loss before and after 20 steps."""
    old = [torch.load(file_of(folder, r), weights_only=True) for r in range(RANKS)]
    states = thinwire.ddp.reshard((o["thinwire"] for o in reversed(old)), world_size, conserve)
    scale = world_size / RANKS if conserve == "mean" else 1.0
    olds, news = [flat(o["thinwire"]) for o in old], [flat(s) for s in states]
    for key, value in olds[0].items():
        if key.startswith(("residual.", "velocity.")):
            total = sum(o[key].double() for o in olds)
            shared = sum(n[key].double() for n in news)
            largest = max(float(o[key].abs().max()) for o in olds)
            assert float((shared - total * scale).abs().max()) <= 1e-6 * largest, key
            if world_size == RANKS or (conserve == "sum" and world_size > RANKS):
                assert all(torch.equal(n[key], o[key]) for n, o in zip(news, olds, strict=False)), key
        elif isinstance(value, torch.Tensor):
            assert all(torch.equal(n[key], value) for n in news), key  # replicated
        elif key == "selection.":
            assert value
            assert [n[key] for n in news] == [olds[r % RANKS][key] for r in range(world_size)]
        else:
            assert all(n[key] == value for n in news), key

    run = Run(rank, SGD, {**old[0], "thinwire": states[rank]})
    assert run.handle.step == SAVED_AT
    run.handle.flush()
    for name, mean in torch.load(folder / "flush", weights_only=True).items():
        expected = mean * (RANKS / world_size if conserve == "sum" else 1)
        got = run.network.get_parameter(name).grad
        torch.testing.assert_close(torch.zeros_like(mean) if got is None else got, expected, rtol=1e-5, atol=1e-8)
    run.handle.load_state_dict(states[rank])
    first = run.loss()
    run.train(SAVED_AT + 20)
    return models.checksum(list(run.network.parameters())), first, run.loss()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    ranks.run(RANKS, before, folder)
    return folder


@pytest.mark.parametrize(
    ("world_size", "conserve"), [(1, "mean"), (2, "mean"), (3, "mean"), (4, "mean"), (2, "sum"), (4, "sum")]
)
def test_another_number_of_ranks_loses_nothing(checkpoint: Path, world_size: int, conserve: str) -> None:
    results = ranks.run(world_size, after, checkpoint, conserve)
    assert len(set(results)) == 1
    assert results[0][2] < results[0][1]


def refused(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(thinwire.Error) as caught:
        call(*args)
    assert caught.value.code == "invalid_argument"
    return str(caught.value)


def wrong_sets(rank: int, world_size: int, folder: Path) -> None:
    zero, one, two = (torch.load(file_of(folder, r), weights_only=True)["thinwire"] for r in range(RANKS))
    late, small, other = (copy.deepcopy(one) for _ in range(3))
    late["rank_1_of_3"]["step"] = 20
    small["rank_1_of_3"]["residual"]["head.bias"] = torch.zeros(2)
    other["rank_1_of_3"]["velocity"]["who"] = other["rank_1_of_3"]["velocity"].pop("head.bias")
    four = {"rank_0_of_4": zero["rank_0_of_3"]}
    for states, word in (
        ([zero, two], "the state of rank 1 of 3 is missing: take a checkpoint that all ranks have written"),
        ([zero, one, two, one], "the state of rank 1 of 3 is given twice"),
        ([zero, one, two, four], "the states are of 3 and of 4 ranks: they are not of one run"),
        ([zero, late, two], "the state of rank 1 is of step 20, that of rank 0 of step 13"),
        (
            [zero, small, two],
            "the residual of 'head.bias' has 1 elements in the state of rank 0, and 2 in that of rank 1",
        ),
        ([zero, other, two], "of the states of ranks 0 and 1, only one has the velocity of 'head.bias'"),
        ([], "no state is given"),
        (["state.pt"], "the state is of type str, expected what state_dict() returned"),
    ):
        assert refused(thinwire.ddp.reshard, states, 2) == word
    assert "world_size is 0" in refused(thinwire.ddp.reshard, [zero, one, two], 0)
    assert "conserve is 'all'" in refused(thinwire.ddp.reshard, [zero, one, two], 2, "all")


def test_sets_of_states_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    ranks.run(1, wrong_sets, checkpoint)


def changed(good: dict, section: str, name: str, value: Any) -> dict:
    """A copy of a rank's state with one value replaced, or taken out if it is None."""
    state = copy.deepcopy(good)
    at = next(iter(state.values()))
    if name:
        at = at[section]
    if value is None:
        del at[name or section]
    else:
        at[name or section] = value
    return state


BAD_VALUES = [  # section, name, value: what the sentence must say
    ("version", "", 99, "version 99, expected 1"),
    ("step", "", None, "lacks 'step'"),
    ("step", "", "7", "the step in the state of rank 0 is '7', expected a number of steps"),
    ("step", "", -1, "is -1, expected a number of steps"),
    ("residual", "", None, "lacks 'residual'"),
    ("velocity", "", None, "lacks 'velocity'"),
    ("decay_momentum", "", None, "lacks 'decay_momentum'"),
    ("residual", "", "text", "the residual in the state of rank 0 is of type str, expected tensors by name"),
    ("residual", "head.bias", None, "'head.bias'"),
    ("residual", "head.bias", "zeros", "the residual of 'head.bias' in the state of rank 0 is of type str"),
    ("velocity", "head.bias", [0.0], "the velocity of 'head.bias' in the state of rank 0 is of type list"),
    ("residual", "head.bias", torch.zeros(1, dtype=torch.int64), "is of type int64, expected a float32 tensor"),
    ("residual", "head.bias", torch.zeros(3), "'head.bias' has 3 elements, not 1"),
    ("velocity", "head.bias", torch.zeros(3), "'head.bias' has 3 elements, not 1"),
    ("residual", "who", torch.zeros(1), "'who'"),
    ("velocity", "who", torch.zeros(1), "'who'"),
    ("residual", "head.bias", torch.tensor([torch.nan]), "'head.bias' holds a value that is not finite"),
    ("velocity", "head.bias", torch.tensor([torch.inf]), "'head.bias' holds a value that is not finite"),
    ("decay_momentum", "head.bias", None, "lacks the decay_momentum of 'head.bias'"),
    ("decay_momentum", "head.bias", torch.zeros(3), "decay_momentum of 'head.bias' fits no parameter"),
    ("decay_momentum", "who", torch.zeros(1), "decay_momentum of 'who' fits no parameter of the optimizer"),
    ("decay_momentum", "head.bias", torch.tensor([torch.nan]), "decay_momentum of 'head.bias' holds a value that is"),
    ("outside_momentum", "", {"0.9": torch.zeros(1)}, "outside_momentum of '0.9' fits no parameter of the optimizer"),
    ("selection", "", {"unit": (0.5, 1)}, "the selection in the state of rank 0 holds {'unit': (0.5, 1)}"),
    ("selection", "", [("unit", 0.5, -1)], "the selection in the state of rank 0 holds ('unit', 0.5, -1)"),
    ("selection", "", [("unit", 1.5, 1)], "the ratio of unit 'unit' is 1.5"),
]


def wrong_states(rank: int, world_size: int) -> list[tuple[str, str]]:
    """What is to be said and what was said."""
    run = Run(rank, SGD)
    run.train(3)
    good = run.handle.state_dict()
    run.train(6)
    now = flat(run.handle.state_dict())
    said = []
    for section, name, value, words in BAD_VALUES:
        said.append((words, refused(run.handle.load_state_dict, changed(good, section, name, value))))
        assert same(flat(run.handle.state_dict()), now), words
    content = next(iter(good.values()))
    for state, words in (
        (
            {"rank_1_of_1": content},
            "rank 0 of 1 was given the state of rank 1 of 1: residuals differ from rank to rank, so each rank saves "
            "and loads its own",
        ),
        (
            {"rank_0_of_3": content},
            "the state is one of 3 ranks, and the number of ranks is 1 now: make states for it with "
            "thinwire.ddp.reshard(states, 1)",
        ),
        ({"rank_0_of_1": 3}, "the state of rank 0 is of type int, expected a dictionary"),
        ({"model": {}}, "this is no state of thinwire: it lacks a key such as 'rank_0_of_2'"),
        (None, "the state is of type NoneType, expected what state_dict() returned"),
    ):
        said.append((words, refused(run.handle.load_state_dict, state)))
    assert same(flat(run.handle.state_dict()), now)

    alone = thinwire.ddp.HookState(SGD.options(), models.Mlp().named_parameters())
    said.append(("momentum of an optimizer", refused(alone.load_state_dict, changed(good, "velocity", "", {}))))
    run.handle.load_state_dict(good)
    assert same(flat(run.handle.state_dict()), flat(good))
    return said


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    for words, sentence in ranks.run(1, wrong_states)[0]:
        assert words in sentence
        assert "\n" not in sentence


EVERY = 5  # steps between two checkpoints
KILLED_AT = 12
TIMEOUT = 4.0  # seconds


def train_until_a_rank_dies(rank: int, world_size: int, folder: Path) -> tuple[float, float]:
    """The loss at the last checkpoint, and how long the error took to come."""
    run = Run(rank, SGD, timeout=TIMEOUT)
    loss = run.loss()
    while True:
        begin = time.monotonic()
        try:
            run.train(run.step + 1)
        except thinwire.Error:
            seconds = time.monotonic() - begin
            run.save(folder / f"emergency.{rank}.pt")
            return loss, seconds
        if run.step % EVERY == 0:
            run.save(file_of(folder, rank, str(run.step)))
            loss = run.loss()
        if run.step == KILLED_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, world_size: int, folder: Path) -> tuple[float, float, int]:
    """From the last checkpoint that all ranks have written. The loss before and after, checksum of the parameters."""
    old = [torch.load(file_of(folder, r, "10"), weights_only=True) for r in range(RANKS)]
    states = thinwire.ddp.reshard([o["thinwire"] for o in old], world_size)
    run = Run(rank, SGD, {**old[0], "thinwire": states[rank]})
    first = run.loss()
    run.train(run.step + 20)
    assert run.handle.stats().active
    return first, run.loss(), models.checksum(list(run.network.parameters()))


def survivors(rank: int, world_size: int, folder: Path) -> None:
    zero, two = (torch.load(folder / f"emergency.{r}.pt", weights_only=True) for r in (0, 2))
    assert models.checksum(list(zero["model"].values())) == models.checksum(list(two["model"].values()))
    sentence = refused(thinwire.ddp.reshard, [zero["thinwire"], two["thinwire"]], 2)
    assert "the state of rank 1 of 3 is missing" in sentence


def test_training_goes_on_without_a_killed_rank(tmp_path: Path) -> None:
    outcomes = ranks.observe(RANKS, train_until_a_rank_dies, tmp_path, limit=60)
    assert [outcome.status for outcome in outcomes] == [0, -signal.SIGKILL, 0], [o.trace for o in outcomes]
    loss, seconds = outcomes[0].value
    assert max(seconds, outcomes[2].value[1]) < TIMEOUT + 5
    ranks.run(1, survivors, tmp_path)
    results = ranks.run(2, go_on, tmp_path)
    assert results[0] == results[1]
    first, last, _ = results[0]
    assert first == loss
    assert last < first
