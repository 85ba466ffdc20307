"""One rank of the end-to-end benchmark: does what end_to_end.py says, one line of JSON in, one line out.

connect {address}; prepare {model, method, density, options, warm_up}; steps {count}; finish. An answer that is not what
was asked for has `error`.
"""

import itertools
import json
import math
import os
import statistics
import sys
import time
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
import thinwire.ddp

LEARNING_RATE = 0.01
TIMEOUT = timedelta(minutes=3)  # for a rank that has stalled
BATCHES = 8  # different ones, used in turn
PRESETS = {"top_k": thinwire.top_k, "redsync": thinwire.redsync, "dragonn": thinwire.dragonn}
STAGES = ("select", "encode", "exchange", "decode", "exposed_wait")
POWER_SGD_START = 2  # dense steps before; it needs at least two


class Perceptron(nn.Sequential):
    """M1: 5.0 M parameters, a batch of 16."""

    def __init__(self) -> None:
        widths = (512, 1536, 1536, 1024, 256, 10)
        layers = []
        for width, following in itertools.pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        super().__init__(*layers[:-1])

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels."""
        return torch.randn(16, 512, generator=generator), torch.randint(10, (16,), generator=generator)


class Recurrent(nn.Module):
    """M2, a language model: 10.6 M parameters, 4 sequences of 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 600)
        self.lstm = nn.LSTM(600, 600, num_layers=2, batch_first=True)
        self.output = nn.Linear(600, 4000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, 4000]."""
        return self.output(self.lstm(self.embedding(tokens))[0]).flatten(0, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and the tokens that follow."""
        text = torch.randint(4000, (4, 13), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].flatten()


MODELS = {"M1": Perceptron, "M2": Recurrent}


class HandWritten:
    """The state of `hand_written_hook`."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.residuals: dict[tuple[int, int], torch.Tensor] = {}  # by index and size: DDP regroups after its first step


def hand_written_hook(state: HandWritten, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Top-k with error feedback as one would write it with torch.topk."""
    gradient = bucket.buffer()
    key = bucket.index(), gradient.numel()
    if key not in state.residuals:
        state.residuals[key] = torch.zeros_like(gradient)
    residual = state.residuals[key]
    residual += gradient
    k = max(1, round(state.density * gradient.numel()))
    indices = residual.abs().topk(k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0
    ranks = dist.get_world_size()
    all_indices = [torch.empty(k, dtype=torch.int32) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(all_indices, indices.int())
    dist.all_gather(all_values, values)
    gradient.zero_()
    gradient.scatter_add_(0, torch.cat(all_indices).long(), torch.cat(all_values))
    gradient /= ranks
    return _finished(gradient)


def no_communication(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that leaves every rank its own gradient."""
    return _finished(bucket.buffer())


def _finished(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


class Training:
    """One model with one method."""

    def __init__(self, order: dict) -> None:
        torch.manual_seed(1)
        network = MODELS[order["model"]]()
        method = order["method"]
        # The replicas are equal as they are made. PowerSGD wants one bucket on Gloo.
        self.model = DistributedDataParallel(
            network, init_sync=False, bucket_cap_mb=1000 if method == "powersgd" else 25
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.handle = None
        if method in PRESETS:
            options = PRESETS[method](order["density"])
            for name, expression in order["options"].items():
                setattr(options, name, eval(expression, {"thinwire": thinwire}))
            self.handle = thinwire.ddp.attach(self.model, options, self.optimizer, timeout=TIMEOUT)
        elif method == "none":
            self.model.register_comm_hook(None, no_communication)
        elif method == "bf16":
            self.model.register_comm_hook(None, bf16_compress_hook)
        elif method == "torch_topk":
            self.model.register_comm_hook(HandWritten(order["density"]), hand_written_hook)
        elif method == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=POWER_SGD_START)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif method != "dense":
            raise ValueError(f"there is no method '{method}'")
        generator = torch.Generator().manual_seed(1000 + dist.get_rank())
        self._batches = [network.batch(generator) for _ in range(BATCHES)]
        self._step = 0
        self.loss = math.nan

    def step(self) -> None:
        """One step of training."""
        inputs, labels = self._batches[self._step % BATCHES]
        self._step += 1
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()

    def checksum(self) -> int:
        """Of all parameters."""
        value = 0
        for parameter in self.model.parameters():
            value = zlib.crc32(parameter.detach().numpy(), value)
        return value


class Rank:
    """Carries out one order after the other."""

    def __init__(self) -> None:
        self._training: Training | None = None

    def connect(self, order: dict) -> dict:
        """A process group with new connections, since those of another rate keep its packet size."""
        if dist.is_initialized():
            dist.destroy_process_group()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", order["address"], rank=rank, world_size=ranks, timeout=TIMEOUT)
        return {}

    def prepare(self, order: dict) -> dict:
        """Makes model, DDP and method; takes the steps that do not count, and says how long one takes."""
        self._training = Training(order)
        seconds = []
        for _ in range(order["warm_up"]):
            begin = time.monotonic()
            self._training.step()
            seconds.append(time.monotonic() - begin)
        parameters = sum(p.numel() for p in self._training.model.parameters())
        return {"step_seconds": min(seconds[-2:]), "parameters": parameters}

    def steps(self, order: dict) -> dict:
        """Takes steps, beginning with the other ranks; begin and end by the clock that all ranks of a machine share."""
        training = self._training
        stats = []
        dist.barrier()
        begin, cpu = time.monotonic(), time.process_time()
        for _ in range(order["count"]):
            training.step()
            if training.handle:
                stats.append(training.handle.stats())
        answer = {
            "begin": begin,
            "end": time.monotonic(),
            "cpu_seconds": time.process_time() - cpu,
            "loss": training.loss,
            "stats_bytes": None,
            "stages": None,
        }
        if stats:
            answer["stats_bytes"] = statistics.mean(s.bytes_sent for s in stats)
            answer["stages"] = {
                stage: statistics.mean(getattr(s, f"{stage}_seconds") for s in stats) for stage in STAGES
            }
        return answer

    def finish(self, order: dict) -> dict:
        """Gives the model up."""
        training, self._training = self._training, None
        checksum = training.checksum()
        if training.handle:
            training.handle.close()
        return {"checksum": checksum}


def main() -> None:
    """Until the orders end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    rank = Rank()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(rank, order["do"])(order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
