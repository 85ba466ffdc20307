"""The communicator on torch.distributed keeps the contract of communicators."""

import time

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist

import thinwire
from thinwire.c10d import TorchCommunicator


def conformance(rank: int, world_size: int) -> None:
    c = TorchCommunicator(timeout=20)
    assert (c.rank(), c.size()) == (rank, world_size)
    for n in (1, 7, 64, 100_003):
        block = torch.arange(n).add(rank * 31).to(torch.uint8)
        blocks = torch.full((n * world_size + 2,), 99, dtype=torch.uint8)
        c.all_gather(block, blocks[1:-1])
        expected = [torch.arange(n).add(r * 31).to(torch.uint8) for r in range(world_size)]
        assert torch.equal(blocks[1:-1], torch.cat(expected))
        assert blocks[0] == blocks[-1] == 99

        sent = torch.cat([torch.arange(n).add(rank * 31 + to * 7).to(torch.uint8) for to in range(world_size)])
        received = torch.zeros_like(sent)
        c.all_to_all(sent, received)
        expected = [torch.arange(n).add(r * 31 + rank * 7).to(torch.uint8) for r in range(world_size)]
        assert torch.equal(received, torch.cat(expected))

        mine = torch.arange(n, dtype=torch.float32) * (rank + 1)
        sum_ = torch.empty(n)
        c.all_reduce(mine, sum_)
        assert torch.equal(sum_, torch.arange(n, dtype=torch.float32) * sum(range(1, world_size + 1)))
        assert torch.equal(mine, torch.arange(n, dtype=torch.float32) * (rank + 1))
        c.all_reduce(mine, mine)
        assert torch.equal(mine, sum_)
    c._lists = True  # as on a backend that only has collectives on lists
    blocks = torch.zeros(3 * world_size, dtype=torch.uint8)
    c.all_gather(torch.full((3,), rank + 1, dtype=torch.uint8), blocks)
    assert blocks.tolist() == [r + 1 for r in range(world_size) for _ in range(3)]
    arrays = numpy.zeros(2 * world_size, dtype=numpy.uint8)
    c.all_gather(numpy.full(2, rank, dtype=numpy.uint8), arrays)
    assert arrays.tolist() == [r for r in range(world_size) for _ in range(2)]
    c.barrier()
    c.abort("enough")
    with pytest.raises(thinwire.Error, match="enough"):
        c.barrier()
    assert c.dead


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(world_size: int) -> None:
    ranks.run(world_size, conformance)


def reduce_on_subgroups(rank: int, world_size: int) -> list[float]:
    """Two halves of the world, each with a communicator and reducer of its own; and one over all beside them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = TorchCommunicator(groups[rank // 2], timeout=20)
    everyone = TorchCommunicator(timeout=20)
    options = thinwire.top_k(0.5)
    options.dense_below = 0
    half = thinwire.Reducer(options, [("w", 4)], mine)
    whole = thinwire.Reducer(thinwire.dense(), [("w", 4)], everyone)
    a, b = torch.tensor([8.0, 4.0, 2.0, 1.0]) * (rank + 1), torch.ones(4) * rank
    half.begin_step()
    whole.begin_step()
    works = [half.reduce([("w", 4, True)], a), whole.reduce([("w", 4, True)], b)]
    for work in works:
        work.wait()
    assert mine.traffic.calls > 0
    return [*a.tolist(), *b.tolist()]


def test_groups_do_not_disturb_each_other() -> None:
    results = ranks.run(4, reduce_on_subgroups)
    for rank, result in enumerate(results):
        scale = 1.5 if rank < 2 else 3.5
        assert result == [8 * scale, 4 * scale, 0, 0, 1.5, 1.5, 1.5, 1.5]


def alone(rank: int, world_size: int) -> tuple[str, str, str, float]:
    c = TorchCommunicator(timeout=2)
    if rank == 1:
        time.sleep(5)
        return "", "", "", 0.0
    begin = time.monotonic()
    with pytest.raises(thinwire.Error) as first:
        c.all_gather(torch.ones(8, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8))
    seconds = time.monotonic() - begin
    with pytest.raises(thinwire.Error) as second:
        c.barrier()
    return first.value.code.value, str(first.value), str(second.value), seconds


def test_a_wait_ends_and_the_communicator_is_dead() -> None:
    code, first, second, seconds = ranks.run(2, alone)[0]
    assert code == "timeout"
    assert first.startswith("rank 0 of 2 waited 2.")
    assert first.endswith(" s in all_gather for the other ranks, and not all of them came")
    assert second == first
    assert 1.5 < seconds < 7
