"""What the hook costs by itself for a bucket of 25 MB, in processor time of the training loop and of the callback."""

import statistics
import time
from collections.abc import Callable

import models
import ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire._buckets
import thinwire.ddp

LIMIT = 1.5e-3  # seconds; several times what an idle machine needs, and less than one copy of such a bucket


class Wide(nn.Module):
    """[b, 32] -> [b, 1]: a bucket of 6.3 M elements in 50 parameters, as a deep network's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.FEATURES, 7700) for _ in range(25))
        self.head = nn.Linear(7700, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(layer(x) for layer in self.layers))


def overhead(rank: int, world_size: int) -> tuple[float, int]:
    """Median processor seconds of a bucket: in the hook, in what settles the future, around the collective."""
    spent: list[float] = []

    def timed(function: Callable) -> Callable:
        def wrapped(*args: object, **kwargs: object) -> object:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.thread_time() - begin)

        return wrapped

    thinwire._buckets.BucketEngine.reduce = timed(thinwire._buckets.BucketEngine.reduce)
    thinwire._buckets._settle = timed(thinwire._buckets._settle)
    model = DistributedDataParallel(Wide(), bucket_cap_mb=100)
    thinwire.ddp.attach(model, thinwire.top_k(0.001))
    batches = models.Batches(rank, 2)
    of_step = []
    for _ in range(25):
        spent.clear()
        models.loss_of(model, batches()).backward()
        of_step.append(sum(spent))
    return statistics.median(of_step[2:]), len(spent)


def test_a_bucket_of_25_mb_costs_little_python() -> None:
    for seconds, calls in ranks.run(2, overhead):
        assert calls == 2
        assert 0 < seconds < LIMIT
