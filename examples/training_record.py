"""What one training run measures: losses, accuracies or perplexities, bytes and times."""

import time
from statistics import fmean, median

import torch
import torch.distributed as dist

import thinwire


def gather(value: float) -> list[float]:
    """The value of every rank, in rank order."""
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Record:
    """Collects one run on one rank. Every rank calls every method, since `summary` compares notes."""

    def __init__(self, steps: int, metric: str) -> None:
        """`metric` is the name of what is evaluated now and then."""
        self.steps = steps
        self.evaluations: list[tuple[int, float]] = []  # steps done, value
        self._metric = metric
        self._losses = torch.zeros(steps)
        self._compute: list[float] = []
        self._stats: list[thinwire.StepStats] = []
        self._train_seconds = 0.0

    def begin_step(self) -> None:
        """Starts the clocks of a step."""
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def end_step(self, step: int, loss: torch.Tensor, stats: thinwire.StepStats | None) -> None:
        """Stops them. `stats` is what thinwire says of the step, if it took part."""
        self._compute.append(time.thread_time() - self._cpu)
        self._train_seconds += time.perf_counter() - self._wall
        self._losses[step] = loss.detach()
        if stats is not None and stats.active:
            self._stats.append(stats)

    def summary(self, parameters: int) -> dict:
        """The run in figures. Bytes and times are per step and rank, of the sparse steps if there were any.

        Times are medians over the steps, averaged over the ranks: where ranks share cores, a mean would mostly tell how
        often the system took a core away.
        """
        ranks = dist.get_world_size()
        losses = self._losses.clone()
        dist.all_reduce(losses)
        steps = len(losses)
        dense_bytes = 2 * (ranks - 1) / ranks * 4 * parameters
        stats = self._stats

        def milliseconds(*fields: str) -> float:
            seconds = median(sum(getattr(s, field) for field in fields) for s in stats) if stats else 0.0
            return fmean(gather(1e3 * seconds))

        return {
            f"test_{self._metric}": self.evaluations[-1][1],
            "bytes_sent_per_step": fmean(gather(fmean(s.bytes_sent for s in stats) if stats else dense_bytes)),
            "small_bytes_per_step": fmean(s.small_bytes_sent for s in stats) if stats else 0.0,
            "dense_bytes_per_step": dense_bytes,
            "density_sent": fmean(s.density for s in stats) if stats else 1.0,
            "buckets": max((s.jobs for s in stats), default=0),
            "compress_ms": milliseconds("select_seconds", "encode_seconds", "decode_seconds"),
            "select_ms": milliseconds("select_seconds"),
            "encode_ms": milliseconds("encode_seconds"),
            "decode_ms": milliseconds("decode_seconds"),
            "exchange_ms": milliseconds("exchange_seconds"),
            "compute_ms": fmean(gather(1e3 * median(self._compute))),
            "step_ms": 1e3 * self._train_seconds / steps,
            "train_seconds": self._train_seconds,
            f"{self._metric}_curve": self.evaluations,
            "loss_curve": [round(loss, 5) for loss in (losses / ranks).tolist()],
        }
