"""Trains a small CNN on Fashion-MNIST under DistributedDataParallel, with and without thinwire.

    torchrun --nproc-per-node 4 examples/fashion_mnist.py --method redsync --density 0.001 --seed 1 --out run.json

Ranks are processes on CPU, one thread each, connected by Gloo. Several methods may be named: they run one after the
other, from the same initial weights, over the same examples in the same order.
"""

import argparse
import json
import os
import sys
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fashion_mnist_data import DatasetError, load, locate
from fashion_mnist_record import Record, gather
from progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
import thinwire.ddp

BATCH = 128  # examples a step, of all ranks together
LEARNING_RATE = 0.05
MOMENTUM = 0.9
TIMEOUT = timedelta(minutes=2)  # for a rank that has stalled
EVALUATIONS = 6  # during a run, the last one at its end
METHODS = ("dense", "redsync", "dragonn", "dragonn_a", "top_k", "no error feedback")
TASKS = {  # channels of the two convolutions, width of the hidden layer
    "T1": (16, 32, 512),  # 813,258 parameters
    "T1s": (8, 16, 256),  # 204,778 parameters
}


@dataclass
class Images:
    """Pixels [n, 28, 28] u8 and labels [n] i64."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> "Images":
        """The first `count` of them."""
        return Images(self.pixels[:count], self.labels[:count])

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized images [b, 1, 28, 28] f32 and labels [b]; mean and deviation are the training set's."""
        return (self.pixels[indices].unsqueeze(1) - 72.94) / 90.02, self.labels[indices]


def network(task: str) -> nn.Module:
    """Two convolutions and two linear layers, for images [b, 1, 28, 28]."""
    first, second, hidden = TASKS[task]
    layers = nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * 7 * 7, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    return layers.to(memory_format=torch.channels_last)  # convolution and pooling are faster that way on CPU


def compression(method: str, density: float, dense_steps: int, seed: int) -> thinwire.ReducerOptions:
    """The options of a method, by its name here."""
    if method == "redsync":
        options = thinwire.redsync(density)
    elif method in ("dragonn", "dragonn_a"):
        options = thinwire.dragonn(density, layout="a" if method == "dragonn_a" else "b")
    else:
        options = thinwire.top_k(density)
    if method == "no error feedback":  # the control: what is not sent is lost; the optimizer keeps its momentum
        options.error_feedback = False
        options.unit = "parameter"
    options.schedule = thinwire.Schedule(dense_steps=dense_steps)
    options.seed = seed
    return options


def train(method: str, args: argparse.Namespace, train_set: Images, test_set: Images) -> dict:
    """Trains one model with one method and returns what was measured. Every rank calls it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(network(args.task))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    # All there is of thinwire in a training script: choose a method, attach it. Without these lines it is plain DDP.
    handle = None
    if method != "dense":
        options = compression(method, args.density, args.warmup, args.seed)
        handle = thinwire.ddp.attach(model, options, optimizer, timeout=TIMEOUT)

    examples = example_order(len(train_set), args, rank, ranks)
    steps = len(examples)
    if not 0 < args.warmup < steps:
        raise ValueError(f"--warmup {args.warmup} must be above 0 and below the number of steps, {steps}")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / args.warmup, (steps - step) / (steps - args.warmup))
    )
    evaluate_after = {round(steps * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)}
    record = Record(steps)
    progress = Progress(method, steps)
    for step in range(steps):
        images, labels = train_set.batch(examples[step])
        record.begin_step()
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        record.end_step(step, loss, handle.stats() if handle else None)
        schedule.step()
        if step + 1 in evaluate_after:
            record.accuracy.append((step + 1, evaluate(model.module, test_set)))
        if rank == 0:
            accuracy = f"accuracy {record.accuracy[-1][1]:.2f} %" if record.accuracy else ""
            progress.update(step + 1, f"loss {loss.item():.3f}  {accuracy}")
    # What waits in the residuals now has no weight, since the learning rate has come down to 0. Where it has not,
    # `handle.flush()` and one more `optimizer.step()` apply it.

    checksum = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    if len(set(gather(checksum))) != 1:
        raise RuntimeError(f"{method}: the ranks hold different parameters after {steps} steps")
    if handle:
        handle.detach()
    return {
        "method": method,
        "density": 1.0 if method == "dense" else args.density,
        "ranks": ranks,
        "seed": args.seed,
        "task": args.task,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "dense_steps": steps if method == "dense" else args.warmup,
        **record.summary(sum(p.numel() for p in model.parameters())),
    }


def example_order(count: int, args: argparse.Namespace, rank: int, ranks: int) -> torch.Tensor:
    """Indices [steps, BATCH / ranks] of this rank's examples: its share of an order that depends on the seed alone."""
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(args.epochs)])
    steps = len(order) // BATCH
    return order[: steps * BATCH].reshape(steps, ranks, BATCH // ranks)[:, rank]


@torch.inference_mode()
def evaluate(model: nn.Module, test_set: Images) -> float:
    """Accuracy on the test set in percent; each rank looks at its share of the images."""
    correct = torch.zeros(())
    for share in torch.arange(len(test_set))[dist.get_rank() :: dist.get_world_size()].split(250):
        images, labels = test_set.batch(share)
        correct += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    return 100 * correct.item() / len(test_set)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on Fashion-MNIST; start it with torchrun.")
    parser.add_argument(
        "--method",
        nargs="+",
        choices=METHODS,
        default=["redsync"],
        metavar="METHOD",
        help="one or several of: " + ", ".join(METHODS),
    )
    parser.add_argument("--density", type=float, default=0.001, help="share of the entries sent (default 0.001)")
    parser.add_argument("--epochs", type=int, default=3, help="default 3")
    parser.add_argument(
        "--warmup",
        type=int,
        default=100,
        metavar="STEPS",
        help="dense steps before compression starts, and warm-up of the learning rate (default 100)",
    )
    parser.add_argument("--task", choices=TASKS, default="T1", help="T1: 813,258 parameters, T1s: 204,778")
    parser.add_argument("--seed", type=int, default=1, help="of weights, order of examples and hashing (default 1)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with Fashion-MNIST's four files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there, as JSON")
    parser.add_argument("--smoke", action="store_true", help="a few dozen steps on a small part of the data")
    return parser.parse_args()


def load_data(folder: Path | None) -> tuple[Images, Images]:
    """Training and test set. Rank 0 looks for them, and downloads them if need be, for all ranks."""
    found: list = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = locate(folder)
        except DatasetError as error:
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1]:
        raise found[1]
    halves = (map(torch.tensor, load(found[0], part)) for part in ("train", "test"))
    train_set, test_set = (Images(pixels, labels.long()) for pixels, labels in halves)
    return train_set, test_set


def run(args: argparse.Namespace) -> None:
    """Trains with each method in turn; rank 0 prints and writes the results."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_data(args.data)
    if args.smoke:
        args.epochs, args.warmup = 1, 10
        train_set, test_set = train_set.first(40 * BATCH), test_set.first(1000)
    if BATCH % ranks != 0:
        raise ValueError(f"{BATCH} examples a step cannot be shared evenly by {ranks} ranks")
    results = []
    for method in args.method:
        result = train(method, args, train_set, test_set)
        results.append(result)
        if rank == 0:
            print(
                f"{method}: test accuracy {result['test_accuracy']:.2f} %, "
                f"{result['bytes_sent_per_step'] / 1e3:.1f} kB sent per step and rank "
                f"(dense {result['dense_bytes_per_step'] / 1e3:.1f} kB), {result['train_seconds']:.0f} s",
                flush=True,
            )
    if rank == 0 and args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


def main() -> None:
    """Connects the ranks and trains with each method in turn."""
    args = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit("Start it with torchrun, for instance: torchrun --nproc-per-node 4 examples/fashion_mnist.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        run(args)
    except (DatasetError, thinwire.Error, ValueError) as error:
        sys.exit(f"rank {dist.get_rank()}: {error}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
