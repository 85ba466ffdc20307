"""What test_exit.py starts: short trainings that end in the ways that the arguments say, each by the interpreter's own
exit.

    torchrun scripts_exit.py HOW             the ranks of one training
    python scripts_exit.py FOLDER HOW...     one training after the other; ranks are forked, so torch is imported once

The second form writes FOLDER/<how>.<rank> with all that the rank printed, and prints the exit statuses as JSON.
"""

import gc
import json
import os
import signal
import sys
import weakref
from pathlib import Path

import models
import torch
import torch._dynamo  # which DDP and optimizers import in their first step
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp


def main(how: str) -> None:
    """Trains and ends."""
    rank = dist.get_rank()
    if how == "fsdp":
        train_fsdp()
    else:
        train_ddp(how)
    print(f"rank {rank} has come to the end", flush=True)


def train_fsdp() -> None:
    """Two models, one of which is dropped."""
    import thinwire.fsdp

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    kept = []
    for _ in range(2):
        model = torch.distributed.fsdp.fully_shard(models.Mlp(), mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        thinwire.fsdp.attach(model, models.METHODS["redsync"](), optimizer, replicate_group=mesh["replicate"])
        batches = models.Batches(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            models.loss_of(model, batches()).backward()
            optimizer.step()
        kept.append(weakref.ref(model))
    gc.collect()
    assert kept[0]() is None
    sys.kept = kept[1]()  # outlives the interpreter's clean-up


def train_ddp(how: str) -> None:
    """A model that ends in the way that `how` says."""
    rank = dist.get_rank()
    model = DistributedDataParallel(models.Mlp(), bucket_cap_mb=8 * models.KB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = thinwire.ddp.attach(model, models.METHODS["redsync"](), optimizer)
    batches = models.Batches(rank)

    def step(batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        optimizer.zero_grad()
        models.loss_of(model, batches() if batch is None else batch).backward()
        optimizer.step()

    for _ in range(5):
        step()
    if how == "loader":
        x, y = batches()
        data = torch.utils.data.TensorDataset(x, y)
        for _ in range(2):
            for batch in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
                step(batch)
    elif how == "forks":
        pid = os.fork()
        if pid == 0:
            try:
                handle.stats()
            except thinwire.Error as error:
                assert "belongs to the process that made it" in str(error)
                handle.close()
                gc.collect()
                os._exit(3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        pid = os.fork()
        if pid == 0:
            sys.exit(5)  # runs what is registered for the exit
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        step()
    elif how == "destroyed":
        dist.barrier()
        dist.destroy_process_group()
    elif how == "closed":
        handle.close()
        handle.close()
        communicators = thinwire.make_thread_communicators(1)
        alone = thinwire.Reducer(thinwire.dense(), [("w", 4)], communicators[0])
        alone.begin_step()
        alone.reduce([("w", 4, True)], torch.ones(4), lambda error: None)
        sys.kept = alone  # outlives the interpreter's clean-up
    elif how == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step()
            raise AssertionError("no error came")
        except thinwire.Error as error:
            assert error.code == "remote"
            torch.save(handle.state_dict(), os.devnull)
    elif how == "dropped":
        del model, optimizer, handle
        gc.collect()


def fork_ranks(folder: Path, hows: list[str], ranks: int = 2) -> str | None:
    """In a rank: how it shall end. In the parent: None, after all ranks have ended."""
    statuses = {}
    for how in hows:
        pids = []
        for rank in range(ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                output = os.open(folder / f"{how}.{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(output, 1)
                os.dup2(output, 2)
                meeting_point = f"file://{folder}/{how.replace(' ', '_')}.store"
                dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks)
                return how
        statuses[how] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(statuses))
    return None


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        main(sys.argv[1])
    else:
        how = fork_ranks(Path(sys.argv[1]), sys.argv[2:])
        if how is not None:
            main(how)
