"""The lab: exit codes, clean-up however it ends, links that hold their rate, counters that count."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

NETLAB = Path(__file__).resolve().parents[2] / "bench" / "netlab"
STATE = Path("/run/thinwire-netlab")
MEBIBYTE = 1 << 20

possible = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
if possible:  # root of a container may not be allowed to make namespaces
    probe = f"twtest-{secrets.token_hex(3)}"
    possible = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
needs_lab = pytest.mark.skipif(not possible, reason="needs iproute2 and the right to make network namespaces")


started: list["Running"] = []


@dataclass
class Running:
    """One netlab process. `marker` is in the command line of all that runs inside."""

    process: subprocess.Popen
    marker: str
    id: str = ""

    def wait_for(self, ranks: int) -> None:
        """Waits until the ranks run, each with its child."""
        deadline = time.monotonic() + 10
        while len(marked(self.marker, "sleep")) < ranks:
            assert self.process.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Exit code, output and errors; nothing of the lab is left."""
        output, errors = self.process.communicate(timeout=20)
        assert leftovers(self) == []
        return self.process.returncode, output, errors


def marked(marker: str, program: str = "") -> list[str]:
    """Processes with the marker in their command line, netlab itself apart."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if marker in line and str(NETLAB) not in line and line.startswith(program):
                found.append(f"process {file.parent.name}: {line}")
    return found


def leftovers(lab: Running) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return (
        [name for name in names if name.startswith(f"tw{lab.id}-")]
        + [str(path) for path in STATE.glob(f"{lab.id}-*")]
        + marked(lab.marker)
    )


def start(*options: str, script: str) -> Running:
    """netlab with a shell script as its command; in the script, MARKER is a number of seconds that is unique."""
    marker = f"1000.{secrets.randbelow(10**9):09}"
    command = [sys.executable, str(NETLAB), *options, "--", "sh", "-c", script.replace("MARKER", marker)]
    lab = Running(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), marker)
    started.append(lab)
    deadline = time.monotonic() + 10
    while not lab.id:
        assert lab.process.poll() is None and time.monotonic() < deadline, lab.process.communicate()
        lab.id = next((path.name.split("-")[0] for path in STATE.glob(f"*-{lab.process.pid}-*")), "")
    return lab


@pytest.fixture(autouse=True)
def _end_what_a_failed_test_left() -> Iterator[None]:
    started.clear()
    yield
    for lab in started:
        if lab.process.poll() is None:
            lab.process.terminate()
            lab.process.communicate(timeout=20)


def gc() -> str:
    done = subprocess.run([sys.executable, NETLAB, "--gc"], capture_output=True, text=True, check=True, timeout=20)
    return done.stderr


SLEEPERS = "sleep MARKER & exec sleep MARKER"  # two processes a rank, one of them not waited for
IMMUNE = "trap '' TERM; sleep MARKER & wait; wait; while :; do sleep MARKER; done"


@needs_lab
def test_success_passes_lines_through_and_sets_torchrun_variables(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    echo = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"
    script = f"{echo} $GLOO_SOCKET_IFNAME; echo rank $RANK says a word >&2; sleep MARKER & true"
    options = ("--hosts", "2", "--ranks-per-host", "2", "--rate", "1gbit,10mbit", "--stats", str(stats))
    code, output, errors = start(*options, script=script).end()
    assert code == 0
    rest = "10.201.0.1 29500 eth0"
    assert sorted(output.splitlines()) == [
        f"0 4 0 2 0 {rest}",
        f"1 4 1 2 0 {rest}",
        f"2 4 0 2 1 {rest}",
        f"3 4 1 2 1 {rest}",
    ]
    assert all(f"rank {rank} says a word\n" in errors for rank in range(4))
    assert "1,000 Mbit/s" in errors and "10 Mbit/s" in errors
    report = json.loads(stats.read_text())
    assert report["exit_code"] == 0 and [row["rate_bits"] for row in report["hosts"]] == [10**9, 10**7]


@needs_lab
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("exit 7", 7, "rank 1 on host 1 exited with status 7"),
        ("kill -SEGV $$", 139, "rank 1 on host 1 was ended by SIGSEGV"),
    ],
)
def test_a_rank_that_fails_ends_all(fault: str, code: int, words: str) -> None:
    script = (
        f"echo begins; test $RANK != 1 || {{ sleep 0.3; {fault}; }}; trap 'echo ends; exit 9' TERM; {SLEEPERS} & wait"
    )
    begin = time.monotonic()
    result = start("--hosts", "3", "--rate", "100mbit", "--tag", script=script).end()
    assert result[0] == code and f"netlab: {words}\n" in result[2]
    assert sorted(result[1].splitlines())[:3] == ["[rank 0] begins", "[rank 0] ends", "[rank 1] begins"]
    assert time.monotonic() - begin < 6


@needs_lab
def test_time_limit_ends_even_those_that_ignore_sigterm() -> None:
    begin = time.monotonic()
    code, _, errors = start("--hosts", "2", "--rate", "100mbit", "--timeout", "0.7", script=IMMUNE).end()
    assert code == 124 and "netlab: stopped after 0.7 s, the time limit\n" in errors
    assert 0.7 < time.monotonic() - begin < 8


@needs_lab
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals(number: signal.Signals, code: int) -> None:
    lab = start("--hosts", "2", "--rate", "100mbit", script=SLEEPERS)
    lab.wait_for(4)
    lab.process.send_signal(number)
    status, _, errors = lab.end()
    assert status == code and f"stopped by {number.name}" in errors and "Traceback" not in errors


@needs_lab
def test_signal_while_the_lab_is_being_built() -> None:
    lab = start("--hosts", "4", "--rate", "100mbit", script=SLEEPERS)
    lab.process.send_signal(signal.SIGINT)
    assert lab.end()[0] == 130


@needs_lab
def test_gc_after_sigkill_leaves_living_labs_alone() -> None:
    """Three labs at once; one is killed, gc removes it, and the others go on."""
    labs = [start("--hosts", "2", "--rate", "100mbit", script=SLEEPERS) for _ in range(3)]
    for lab in labs:
        lab.wait_for(4)
    assert len({lab.id for lab in labs}) == 3
    killed, *living = labs
    killed.process.kill()
    killed.process.communicate()
    deadline = time.monotonic() + 5
    while len(marked(killed.marker)) > 2:  # the ranks die at once, what they started waits for gc
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert any(line.startswith(f"tw{killed.id}-") for line in leftovers(killed))
    assert gc().startswith("netlab: removed ")
    assert leftovers(killed) == []
    for lab in living:
        assert lab.process.poll() is None and len(marked(lab.marker, "sleep")) == 4
        lab.process.terminate()
    assert [lab.end()[0] for lab in living] == [143, 143]
    assert gc().startswith("netlab: removed ")  # nothing to do is no error


TRANSFER = """
import os, socket, time
sender = os.environ["RANK"] == "1"
if sender:
    for attempt in range(200):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], 29500))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes(1 << 20))
    connection.recv(1)
else:
    connection = socket.create_server(("", 29500)).accept()[0]
    begin, left = time.monotonic(), 1 << 20
    while left:
        left -= len(connection.recv(left))
    print(time.monotonic() - begin)
    connection.sendall(b"x")
"""


@needs_lab
@pytest.mark.parametrize("rates", ["16mbit,1gbit", "1gbit,16mbit"])
def test_links_hold_their_rate_and_count(rates: str, tmp_path: Path) -> None:
    """A mebibyte from host 1 to host 0 through a thin link at either end."""
    program = tmp_path / "transfer.py"
    program.write_text(TRANSFER)
    stats = tmp_path / "stats.json"
    lab = start("--hosts", "2", "--rate", rates, "--stats", str(stats), script=f"exec {sys.executable} {program}")
    code, output, errors = lab.end()
    assert code == 0, errors
    least = (MEBIBYTE - 20_000) * 8 / 16e6  # the bucket comes for free
    assert least < float(output) < 1.5 * least
    receiver, sender = json.loads(stats.read_text())["hosts"]
    frames = MEBIBYTE / 1448
    for count in (sender["sent_bytes"], receiver["received_bytes"]):
        assert MEBIBYTE + 66 * frames < count < 1.1 * MEBIBYTE  # each frame has 66 bytes of headers
    for count in (sender["received_bytes"], receiver["sent_bytes"]):
        assert 66 < count < 0.06 * MEBIBYTE  # acknowledgements


@needs_lab
def test_rate_of_a_living_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NETLAB.parent))
    from lab.network import Lab, LabError

    with Lab([1e8, 1e8]) as lab:
        shown = subprocess.run(
            ["tc", "-n", lab.hosts[1].namespace, "qdisc"], capture_output=True, text=True, check=True
        )
        assert "rate 100Mbit" in shown.stdout
        lab.set_rates([1e8, 2e9])
        shown = subprocess.run(
            ["tc", "-n", lab.hosts[1].namespace, "qdisc"], capture_output=True, text=True, check=True
        )
        assert "rate 2Gbit" in shown.stdout
        assert [row.rate_bits for row in lab.traffic()] == [10**8, 2 * 10**9]
        with pytest.raises(LabError, match="1 rates for 2 hosts"):
            lab.set_rates([1e8])
        process = lab.popen(0, ["sleep", "1000"])
    assert process.wait(timeout=5) == -signal.SIGKILL
    assert not list(STATE.glob(f"{lab.id}-*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 2 --rate 100 -- true", "rate '100' is not a number with kbit, mbit or gbit behind it"),
        ("--hosts 2 --rate 0mbit -- true", "rate '0mbit' is not between 100kbit and 100gbit"),
        ("--hosts 0 --rate 100mbit -- true", "--hosts 0 is not a positive number"),
        ("--hosts two --rate 100mbit -- true", "argument --hosts: invalid int value: 'two'"),
        ("--hosts 3 --rate 1gbit,100mbit -- true", "--rate has 2 rates for 3 hosts"),
        ("--hosts 2 --rate 100mbit --ranks-per-host 0 -- true", "--ranks-per-host 0 is not a positive number"),
        ("--hosts 2 --rate 100mbit --timeout 0 -- true", "--timeout 0 is not a number of seconds between 0 and"),
        ("--hosts 2 --rate 100mbit --timeout inf -- true", "--timeout inf is not a number of seconds"),
        ("--hosts 2 --rate 100mbit --stats / -- true", "--stats / is a folder"),
        ("--hosts 2 --rate 100mbit --stats /nowhere/x -- true", "the folder of --stats /nowhere/x does not exist"),
        ("--hosts 2 --rate 100mbit", "no command"),
        ("--hosts 2 --rate 100mbit -- no-such-command", "command 'no-such-command' not found"),
        ("--rate 100mbit -- true", "--hosts and --rate are needed"),
        ("--hosts 2 --rate 100mbit true", "unrecognized arguments: true"),
    ],
)
def test_bad_input_gives_one_sentence(arguments: str, words: str) -> None:
    done = subprocess.run([sys.executable, NETLAB, *arguments.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"netlab: {words}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("user", "path", "words"),
    [
        (1000, os.environ["PATH"], "network namespaces need root"),
        (0, "", "ip and tc not found: install the package iproute2"),
    ],
)
def test_what_it_needs(user: int, path: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path and not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs iproute2")
    monkeypatch.syspath_prepend(str(NETLAB.parent))
    from lab.network import LabError, require

    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", path)
    with pytest.raises(LabError, match=words):
        require()


MPI = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  int rank, size, sum;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  static char block[1 << 20];
  MPI_Bcast(block, sizeof block, MPI_CHAR, 0, MPI_COMM_WORLD);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  printf("rank %d of %d, sum %d\n", rank, size, sum);
  fflush(stdout);
  if (argc > 1) rank == 1 ? exit(5) : MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
}
"""


@needs_lab
@pytest.mark.skipif(not (shutil.which("mpirun") and shutil.which("mpicc")), reason="needs Open MPI")
def test_mpi(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(MPI)
    program = str(tmp_path / "program")
    subprocess.run(["mpicc", "-o", program, f"{program}.c"], check=True)
    stats = tmp_path / "stats.json"
    options = ["--hosts", "3", "--rate", "100mbit", "--mpi", "--stats", str(stats), "--timeout", "30"]
    command = [sys.executable, NETLAB, *options, "--", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3, sum 3" for rank in range(3)]
    assert sum(row["sent_bytes"] for row in json.loads(stats.read_text())["hosts"]) > 2 * MEBIBYTE
    done = subprocess.run([*command, "fail"], capture_output=True, text=True, check=False)
    assert done.returncode == 5 and "mpirun on host 0 exited with status 5" in done.stderr
    assert marked(program) == []
