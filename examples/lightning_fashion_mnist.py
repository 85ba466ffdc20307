"""Trains a small CNN on Fashion-MNIST with Lightning's Trainer, its gradients reduced by thinwire.

    python examples/lightning_fashion_mnist.py --ranks 2 --steps 200

The Trainer starts the ranks: processes on CPU, connected by Gloo. Needs `pip install lightning`.
"""

import argparse
from pathlib import Path

import torch
from fashion_mnist import BATCH, LEARNING_RATE, MOMENTUM, network, read_images
from fashion_mnist_data import locate
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import thinwire.lightning


class Classifier(LightningModule):
    """The task's network, its loss and its optimizer. Nothing of thinwire in it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network("T1s")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Loss of one rank's examples."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Logs the accuracy in percent."""
        images, labels = batch
        correct = (self.network(images).argmax(1) == labels).float()
        self.log("accuracy", 100 * correct.mean(), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD; thinwire takes its momentum over."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def train(args: argparse.Namespace) -> tuple[Trainer, Classifier, thinwire.lightning.Thinwire, float]:
    """Trains for some steps; returns the accuracy on the test set too. Every rank calls it."""
    torch.manual_seed(args.seed)
    options = thinwire.redsync(density=args.density)
    options.schedule = thinwire.Schedule(dense_steps=args.warmup)
    compression = thinwire.lightning.Thinwire(options)  # all there is of thinwire: a callback
    trainer = Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy="ddp",
        callbacks=[compression],
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, loader(args, "train"))
    accuracy = trainer.validate(model, loader(args, "test"), verbose=False)[0]["accuracy"]
    return trainer, model, compression, accuracy


def loader(args: argparse.Namespace, part: str) -> DataLoader:
    """Batches of one rank; the Trainer gives each rank its share of the examples."""
    images = read_images(locate(args.data), part)
    examples = TensorDataset(*images.batch(torch.arange(len(images))))
    return DataLoader(examples, BATCH // args.ranks, shuffle=part == "train", drop_last=part == "train")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on Fashion-MNIST with Lightning and thinwire.")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--steps", type=int, default=400, help="default 400; an epoch has 468")
    parser.add_argument("--warmup", type=int, default=50, help="dense steps before compression starts (default 50)")
    parser.add_argument("--density", type=float, default=0.001, help="share of the entries sent (default 0.001)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with Fashion-MNIST's four files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer, _, compression, accuracy = train(parse_arguments())
    if trainer.is_global_zero:
        print(f"test accuracy {accuracy:.2f} %")
        print(compression.handle.report())
