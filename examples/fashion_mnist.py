"""Trains a small CNN on Fashion-MNIST under DistributedDataParallel, with and without thinwire.

    torchrun --nproc-per-node 4 examples/fashion_mnist.py --method redsync --density 0.001 --seed 1 --out run.json

Ranks are processes on CPU, one thread each, connected by Gloo. Several methods may be named: they run one after the
other, from the same initial weights, over the same examples in the same order.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import training
from fashion_mnist_data import DatasetError, load, locate
from progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training_record import Record

import thinwire.ddp

BATCH = 128  # examples a step, of all ranks together
LEARNING_RATE = 0.05
MOMENTUM = 0.9
TASKS = {  # channels of the convolutions, 0 for pooling by 2; widths of the hidden layers
    "T1": ((16, 0, 32, 0), (512,)),  # 813,258 parameters
    "T1s": ((8, 0, 16, 0), (256,)),  # 204,778 parameters
    "T3": ((32, 64, 0, 64, 64, 0, 128, 0), (64,)),  # 240,970 parameters, several tensors of more than 10,000
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
    """3x3 convolutions, then linear layers, for images [b, 1, 28, 28]; ReLU between them."""
    convolutions, widths = TASKS[task]
    layers: list[nn.Module] = []
    channels, side = 1, 28
    for wanted in convolutions:
        if wanted:
            layers += [nn.Conv2d(channels, wanted, 3, padding=1), nn.ReLU()]
            channels = wanted
        else:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    layers.append(nn.Flatten())
    inputs = channels * side * side
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    layers.append(nn.Linear(inputs, 10))
    # convolution and pooling are faster that way on CPU
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """What the learning rate is multiplied by: up in `warmup` steps, then down to 0."""
    return min((step + 1) / warmup, (steps - step) / (steps - warmup))


def train(method: str, args: argparse.Namespace, train_set: Images, test_set: Images) -> dict:
    """Trains one model with one method and returns what was measured. Every rank calls it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(network(args.task))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    # All there is of thinwire in a training script: choose a method, attach it. Without these lines it is plain DDP.
    handle = None
    if method != "dense":
        last = len(model.module) - 1
        options = training.compression(method, args.density, args.warmup, args.seed, output_layer=[f"{last}.*"])
        handle = thinwire.ddp.attach(model, options, optimizer, timeout=training.TIMEOUT)

    order = example_order(len(train_set), args.epochs, args.seed)
    examples = order.reshape(len(order), ranks, BATCH // ranks)[:, rank]
    steps = len(examples)
    if not 0 < args.warmup < steps:
        raise ValueError(f"--warmup {args.warmup} must be above 0 and below the number of steps, {steps}")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps, args.warmup))
    evaluate_after = training.evaluation_steps(steps)
    record = Record(steps, "accuracy")
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
            record.evaluations.append((step + 1, evaluate(model.module, test_set)))
        if rank == 0:
            accuracy = f"accuracy {record.evaluations[-1][1]:.2f} %" if record.evaluations else ""
            progress.update(step + 1, f"loss {loss.item():.3f}  {accuracy}")
    # What waits in the residuals now has no weight, since the learning rate has come down to 0. Where it has not,
    # `handle.flush()` and one more `optimizer.step()` apply it.

    measured = training.result(method, args, model, record, task=args.task)
    if handle:
        handle.detach()
    return measured


def example_order(count: int, epochs: int, seed: int) -> torch.Tensor:
    """Indices [steps, BATCH] of the examples, in an order that depends on the seed alone; ranks share a step's."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
    steps = len(order) // BATCH
    return order[: steps * BATCH].reshape(steps, BATCH)


@torch.inference_mode()
def evaluate(model: nn.Module, test_set: Images) -> float:
    """Accuracy on the test set in percent; each rank looks at its share of the images."""
    correct = count_correct(model, test_set, torch.arange(len(test_set))[dist.get_rank() :: dist.get_world_size()])
    dist.all_reduce(correct)
    return 100 * correct.item() / len(test_set)


def count_correct(model: nn.Module, images: Images, indices: torch.Tensor) -> torch.Tensor:
    """How many of these images the model gets right, a scalar f32."""
    correct = torch.zeros(())
    for share in indices.split(250):
        inputs, labels = images.batch(share)
        correct += (model(inputs).argmax(1) == labels).sum()
    return correct


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = training.parser_of("Train a small CNN on Fashion-MNIST", density=0.001)
    parser.add_argument("--epochs", type=int, default=3, help="default 3")
    parser.add_argument(
        "--warmup",
        type=int,
        default=100,
        metavar="STEPS",
        help="dense steps before compression starts, and warm-up of the learning rate (default 100)",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="T1",
        help="T1: 813,258 parameters, T1s: 204,778, T3: 240,970, five convolutions",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with Fashion-MNIST's four files")
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
    return read_images(found[0], "train"), read_images(found[0], "test")


def read_images(folder: Path, part: str) -> Images:
    """The "train" or "test" set from a folder."""
    pixels, labels = map(torch.tensor, load(folder, part))
    return Images(pixels, labels.long())


def run(args: argparse.Namespace) -> None:
    """Trains with each method in turn."""
    train_set, test_set = load_data(args.data)
    if args.smoke:
        args.epochs, args.warmup = 1, 10
        train_set, test_set = train_set.first(40 * BATCH), test_set.first(1000)
    if BATCH % dist.get_world_size() != 0:
        raise ValueError(f"{BATCH} examples a step cannot be shared evenly by {dist.get_world_size()} ranks")
    training.run_methods(args, lambda method: train(method, args, train_set, test_set))


if __name__ == "__main__":
    training.start(parse_arguments(), run, DatasetError)
