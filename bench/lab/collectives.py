"""How long Gloo's collectives take on a lab: what one more round costs, and what it carries for that.

bench/netlab --hosts 4 --rate 1gbit -- .venv/bin/python bench/lab/collectives.py

Prints the median of the slowest rank's times, ranks starting together. A size is that of one rank's block.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = (64, 4 << 10, 28 << 10, 48 << 10, 256 << 10, 1 << 20)  # bytes
REPETITIONS = 40


def milliseconds(collective: Callable[[], object]) -> float:
    """The median over repetitions of the slowest rank's time."""
    times = []
    for _ in range(REPETITIONS):
        dist.barrier()
        begin = time.perf_counter()
        collective()
        mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        times.append(1e3 * mine.item())
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{ranks} ranks     all_gather    all_reduce of the same block")
    for size in SIZES:
        block = torch.zeros(size // 4)
        blocks = torch.zeros(ranks * size // 4)
        gather = milliseconds(lambda block=block, blocks=blocks: dist.all_gather_into_tensor(blocks, block))
        reduce = milliseconds(lambda block=block: dist.all_reduce(block))
        if dist.get_rank() == 0:
            print(f"{size:>9,} B {gather:8.2f} ms {reduce:8.2f} ms")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("collectives.py needs ranks: bench/netlab --hosts 4 --rate 1gbit -- python bench/lab/collectives.py")
    main()
