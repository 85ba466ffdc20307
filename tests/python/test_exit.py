"""A training process that ends, in whatever way, ends with status 0 and without a word; forks do no harm."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("scripts_exit.py")
HOWS = ["plain", "forks", "destroyed", "closed", "dropped", "fsdp"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs it; at the limit, it is killed with all that it started."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """By way to end: exit status and output of every rank."""
    folder = tmp_path_factory.mktemp("endings")
    result = run(str(SCRIPT), str(folder), *HOWS, "killed")
    assert result.returncode == 0, result.stderr
    return {
        how: [(status, (folder / f"{how}.{rank}").read_text()) for rank, status in enumerate(statuses)]
        for how, statuses in json.loads(result.stdout).items()
    }


@pytest.mark.parametrize("how", HOWS)
def test_ranks_end_cleanly(endings: dict, how: str) -> None:
    assert endings[how] == [(0, f"rank {rank} has come to the end\n") for rank in (0, 1)]


def test_a_rank_ends_cleanly_after_an_error(endings: dict) -> None:
    assert endings["killed"] == [(0, "rank 0 has come to the end\n"), (-signal.SIGKILL, "")]


def test_torchrun_ends_cleanly() -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    port = f"--master-port={ranks.free_port()}"
    result = run(*launcher, port, str(SCRIPT), "loader", TORCH_CPP_LOG_LEVEL="ERROR")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("has come to the end") == 2
    assert result.stderr == ""
