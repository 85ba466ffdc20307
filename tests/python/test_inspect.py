"""``python -m thinwire``: what a checkpoint holds, in words; what is none is refused in a sentence."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import models
import pytest
import ranks
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire.ddp
from thinwire.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden"


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    return status, out.getvalue(), err.getvalue()


def state(**changes: object) -> dict:
    """A state as `state_dict` returns it, small enough to be checked by eye."""
    content = {
        "version": 1,
        "step": 120,
        "selection": [("fc.weight", 0.875, 3)],
        "sections": ["residual", "velocity", "decay_momentum"],
        "residual": {"fc.weight": torch.tensor([0.0, -4.0, 0.0, 3.0]), "bias": torch.zeros(1), "none": torch.zeros(0)},
        "velocity": {"fc.weight": torch.tensor([6.0, 0.0, 0.0, 8.0]), "bias": torch.zeros(0)},
        "decay_momentum": {"fc.weight": torch.ones(2, 2)},
    }
    return {"rank_1_of_4": {**content, **changes}}


def saved(folder: Path, value: object) -> str:
    path = folder / "checkpoint.pt"
    torch.save(value, path)
    return str(path)


def test_what_a_state_holds(tmp_path: Path) -> None:
    status, text, errors = run("inspect", saved(tmp_path, state()))
    assert (status, errors) == (0, "")
    rows = [line.split() for line in text.splitlines() if line]
    assert rows == [
        ["rank", "1", "of", "4"],
        ["step", "120"],
        ["parameters", "3,", "5", "elements"],
        ["bytes", str(4 * (5 + 4 + 4))],
        ["decay", "momentum", "1", "tensors,", "4", "elements"],
        ["parameter", "numel", "residual", "nonzero", "velocity", "largest", "entries", "of", "the", "residual"],
        ["fc.weight", "4", "5", "50.0%", "10", "1:-4", "3:3"],
        ["bias", "1", "0", "0.0%", "-"],
        ["none", "0", "0", "0.0%", "-"],
        ["thresholds", "that", "serve", "again:", "unit,", "ratio,", "uses"],
        ["fc.weight", "0.875", "3"],
    ]


def test_states_are_found_however_deep(tmp_path: Path) -> None:
    nested = {
        "model": {"w": torch.ones(2)},
        "epoch": 3,
        "callbacks": [{"thinwire": state()}, {"thinwire": state(step=7)}],
    }
    status, text, _ = run("inspect", saved(tmp_path, nested))
    assert status == 0
    assert "at                 ['callbacks'][0]['thinwire']" in text
    assert "at                 ['callbacks'][1]['thinwire']" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step")] == ["120", "7"]


def train_and_save(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(models.Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    handle = thinwire.ddp.attach(model, models.METHODS["threshold_search"](), optimizer)
    batches = models.Batches(rank)
    for _ in range(3):
        optimizer.zero_grad()
        models.loss_of(model, batches()).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "thinwire": handle.state_dict()}, path + str(rank))


def test_a_handles_own_state(tmp_path: Path) -> None:
    ranks.run(2, train_and_save, str(tmp_path / "rank"))
    status, text, _ = run("inspect", str(tmp_path / "rank1"))
    assert status == 0
    assert "rank               1 of 2" in text
    assert "step               3" in text
    for name, parameter in models.Mlp().named_parameters():
        assert f"\n{name} " in text
        assert str(parameter.numel()) in text
    assert "thresholds that serve again" in text


def test_what_is_no_checkpoint_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for content, words in [
        (b"", "no checkpoint"),
        (b"no checkpoint at all", "no checkpoint"),
        (b"PK\x03\x04" + bytes(50), "no checkpoint"),
        ((GOLDEN / "sparse.bin").read_bytes(), "is a payload, not a checkpoint: `thinwire inspect"),
    ]:
        path = tmp_path / "file"
        path.write_bytes(content)
        refused(run("inspect", str(path)), str(path), words)
    for value, words in [
        ({"model": {"w": torch.ones(2)}}, "holds no state of thinwire"),
        (3, "holds no state of thinwire"),
        (state(residual={"w": 3}), "the residual of 'w' in the state of rank 1 is of type int"),
        (state(velocity=[1]), "the velocity in the state of rank 1 is of type list"),
        (state(selection=[("w", 1)]), "the selection in the state of rank 1 holds ('w', 1)"),
        (state(version=9), "has version 9"),
        ({"path": Path("x")}, "objects that are not loaded"),
    ]:
        refused(run("inspect", saved(tmp_path, value)), "checkpoint.pt", words)
    refused(run("inspect", str(tmp_path / "absent")), "absent", "cannot be read: No such file")
    refused(run("inspect", str(tmp_path)), str(tmp_path), "cannot be read")


def refused(done: tuple[int, str, str], *words: str) -> None:
    status, _, errors = done
    assert status == 1
    assert errors.startswith("thinwire: ")
    assert len(errors.strip().splitlines()) == 1, errors
    assert all(word in errors for word in words), errors


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["thinwire"] == thinwire.__version__
    assert lines["torch"] == torch.__version__
    assert "gloo" in lines["backends"]


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "thinwire", "inspect", saved(tmp_path, state())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 of 4" in done.stdout
