"""thinwire in Lightning: the callback does what a script by hand does, bit for bit, and checkpoints carry all of it."""

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import models
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import thinwire.ddp

pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

import thinwire.lightning

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BATCHES = 4  # of an epoch


def examples(rank: int) -> list[tuple[Tensor, Tensor]]:
    """One epoch of one rank."""
    batches = models.Batches(rank, size=8)
    return [batches() for _ in range(BATCHES)]


def optimizer_of(network: nn.Module) -> torch.optim.SGD:
    """With all that thinwire takes over."""
    return torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)


class Regression(LightningModule):
    """The tests' model."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = models.Mlp()
        self.automatic_optimization = not manual

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = models.loss_of(self.network, tuple(batch))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.network)


def trainer_of(rank: int, world_size: int, epochs: int, *callbacks: object, **more: object) -> Trainer:
    """A Trainer whose ranks are there already, as under torchrun."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: the process group exists
    quiet = {
        "use_distributed_sampler": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    more = {"strategy": "ddp", "enable_checkpointing": False} | quiet | more
    return Trainer(accelerator="cpu", devices=world_size, max_epochs=epochs, callbacks=list(callbacks), **more)


def callback(**more: object) -> thinwire.lightning.Thinwire:
    """With a sparse method."""
    return thinwire.lightning.Thinwire(models.METHODS["top_k"](), **more)


def fit(trainer: Trainer, model: Regression, **more: object) -> int:
    """Trains; returns the checksum of the parameters."""
    trainer.fit(model, DataLoader(examples(trainer.global_rank), batch_size=None), **more)
    return models.checksum(list(model.network.parameters()))


def by_hand(rank: int, epochs: int, accumulate: int = 1) -> int:
    """What Lightning does, written out."""
    torch.manual_seed(1)
    network = models.Mlp()
    model = DistributedDataParallel(network)
    optimizer = optimizer_of(network)
    thinwire.ddp.attach(model, models.METHODS["top_k"](), optimizer)
    for step, batch in enumerate(examples(rank) * epochs, 1):
        is_last = step % accumulate == 0
        with nullcontext() if is_last else model.no_sync():
            (models.loss_of(model, batch) / accumulate).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return models.checksum(list(network.parameters()))


def optimizations(rank: int, world_size: int) -> dict[str, int]:
    warnings.filterwarnings("error", message=".*thinwire.*")
    sums = {"by hand": by_hand(rank, 2), "accumulated by hand": by_hand(rank, 2, accumulate=2)}
    for name, manual, accumulate in (("automatic", False, 1), ("manual", True, 1), ("accumulated", False, 2)):
        compression = callback()
        trainer = trainer_of(rank, world_size, 2, compression, accumulate_grad_batches=accumulate)
        sums[name] = fit(trainer, Regression(manual))
        stats = compression.handle.stats()
        assert stats.active and stats.step + 1 == trainer.global_step == 2 * BATCHES // accumulate
    return sums


def test_the_same_as_by_hand() -> None:
    first, second = ranks.run(2, optimizations)
    assert first == second
    assert first["automatic"] == first["manual"] == first["by hand"]
    assert first["accumulated"] == first["accumulated by hand"] != first["by hand"]


def checkpoints(rank: int, world_size: int, folder: Path) -> None:
    straight = fit(trainer_of(rank, world_size, 4, callback()), Regression())

    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    half = trainer_of(rank, world_size, 2, callback(), saver, enable_checkpointing=True)
    halfway = fit(half, Regression())
    half.save_checkpoint(folder / "after.ckpt")
    assert halfway != straight
    for name in ("epoch=1.ckpt", "after.ckpt"):
        resumed = callback()
        assert fit(trainer_of(rank, world_size, 4, resumed), Regression(), ckpt_path=folder / name) == straight
        assert resumed.handle.step == 4 * BATCHES - 1
    saved = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    assert [list(state) for state in saved["thinwire"]] == [["rank_0_of_2"], ["rank_1_of_2"]]

    # One that three ranks would have written.
    if rank == 0:
        torch.save(saved | {"thinwire": thinwire.ddp.reshard(saved["thinwire"], 3)}, folder / "three.ckpt")
    torch.distributed.barrier()
    resumed = callback()
    fit(trainer_of(rank, world_size, 4, resumed), Regression(), ckpt_path=folder / "three.ckpt")
    assert resumed.handle.step == 4 * BATCHES - 1


def without_ddp(rank: int, world_size: int, folder: Path) -> None:
    trainer = trainer_of(rank, world_size, 4, callback(), strategy="auto")
    with pytest.raises(thinwire.Error, match="which a run without DDP would lose"):
        fit(trainer, Regression(), ckpt_path=folder / "three.ckpt")


def test_checkpoints(tmp_path: Path) -> None:
    ranks.run(2, checkpoints, tmp_path)
    ranks.run(1, without_ddp, tmp_path)


def uses(rank: int, world_size: int) -> None:
    # A flush at the end: nothing waits any more.
    compression = callback(flush=True)
    trainer = trainer_of(rank, world_size, 1, compression)
    flushed = fit(trainer, Regression())
    assert flushed != by_hand(rank, 1)
    assert not any(v.any() for v in models.state_of(compression.handle)["residual"].values())

    # The same callback for another fit.
    again = trainer_of(rank, world_size, 2, compression)
    last = compression.handle
    compression._flush = False
    assert fit(again, Regression()) == by_hand(rank, 2)
    assert compression.handle is not last and compression.handle.step == 2 * BATCHES - 1
    with pytest.raises(thinwire.Error, match="thinwire is not attached"):
        last.stats()


def test_flush_and_a_second_fit() -> None:
    ranks.run(2, uses)


class TwoOptimizers(Regression):
    """One for the hidden layers, one for the head."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        loss = models.loss_of(self.network, tuple(batch))
        self.network.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer_of(self.network.layers), optimizer_of(self.network.head)]


def several_optimizers(rank: int, world_size: int) -> int:
    compression = callback()
    trainer = trainer_of(rank, world_size, 2, compression)
    result = fit(trainer, TwoOptimizers())
    assert compression.handle.stats().active
    assert [optimizer.param_groups[0]["momentum"] for optimizer in trainer.optimizers] == [0.9, 0.9]
    return result


def test_several_optimizers_keep_their_momentum() -> None:
    assert len(set(ranks.run(2, several_optimizers))) == 1


class AnyDevice(DDPStrategy):
    """Registers hooks as Lightning does it for CUDA devices."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class OwnOptimizer(Regression):
    """With an optimizer that exists before the Trainer, as the pair of state and hook needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = optimizer_of(self.network)
        self.state = thinwire.ddp.HookState(models.METHODS["top_k"](), self.network.named_parameters(), self.optimizer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def pair(rank: int, world_size: int) -> None:
    model = OwnOptimizer()
    strategy = AnyDevice(ddp_comm_state=model.state, ddp_comm_hook=thinwire.ddp.hook)
    assert fit(trainer_of(rank, world_size, 2, strategy=strategy), model) == by_hand(rank, 2)
    assert model.state.stats().active

    model = OwnOptimizer()
    strategy = DDPStrategy(ddp_comm_state=model.state, ddp_comm_hook=thinwire.ddp.hook)
    with pytest.warns(UserWarning, match="Lightning's DDPStrategy does so on CUDA devices only"):
        fit(trainer_of(rank, world_size, 1, strategy=strategy), model)
    assert not model.state.stats().active
    assert "inactive" in model.state.report()


def test_the_pair_of_state_and_hook() -> None:
    ranks.run(2, pair)


def alone(rank: int, world_size: int) -> None:
    compression = callback()
    trainer = trainer_of(rank, world_size, 1, compression, strategy="auto")
    fit(trainer, Regression())
    assert compression.handle is None
    assert trainer.optimizers[0].param_groups[0]["momentum"] == 0.9


def test_one_process() -> None:
    ranks.run(1, alone)


def test_example() -> None:
    command = [sys.executable, EXAMPLES / "lightning_fashion_mnist.py", "--ranks", "2", "--steps", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (accuracy,) = (line for line in done.stdout.splitlines() if line.startswith("test accuracy"))
    assert float(accuracy.split()[2]) > 70
    assert "step 149: sparse, 201 of 200704 elements" in done.stdout
