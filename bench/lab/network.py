"""Hosts that are network namespaces, each behind a shaped link to a switch.

Every host has one interface, eth0, on a veth pair to a bridge, which is in a namespace of its own. Both ends of the
pair are shaped by tbf, so the rate holds in each direction, headers included. Nothing inside is reachable from outside,
and addresses are the same in every lab.

How the links are shaped, and why so:

* The bucket of a shaper is what an idle link lets through for free. A step of compressed training may send less than
  128 KiB: a bucket of that size would make it cost nothing at any rate. It is 16 KiB, or 0.26 ms of the rate if that is
  more.
* A bucket that small holds the rate only if packets are smaller still: `gso_max_size` is 64 µs of the rate, between
  8,192 bytes and what leaves room for headers in 64 KiB.
* The machine's default congestion control may pace by its own estimate of the link; the route asks for cubic.

`bench/netlab --hosts 2 --rate RATE -- python3 bench/lab/stream.py` measured, on two cores that others used as well (a
frame carries 1,448 bytes of payload in 1,514, so 95.6 % is all there is):

    rate          a TCP stream's share       120 kB on an idle link; due
    100 Mbit/s    95.5 to 95.6 %             9.0 ms    10.0 ms
    500 Mbit/s    94.9 to 95.5 %             1.95 ms   2.01 ms
    1 Gbit/s      95.1 to 95.6 %             0.95 ms   1.00 ms
    10 Gbit/s     91.4 to 93.8 %             0.5 ms    0.10 ms
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STATE = Path("/run/thinwire-netlab")  # a folder <id>-<pid>-<start time> for each lab, by which --gc knows its owner
SUBNET = "10.201.0"
MOST_HOSTS = 250
RATE_RANGE = (1e5, 1e11)  # bit/s
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class LabError(Exception):
    """What is wrong, in one sentence for the user."""


class Stopped(BaseException):
    """A signal asked the lab to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread: a lab is removed on the way out.

    The first one does; those that follow do not disturb the removal.
    """

    def stop(number: int, frame: object) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Inside, the signals of `stoppable` wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parse_rate(text: str) -> float:
    """Bits per second of "100mbit", "1gbit", "2.5gbit"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", text.strip().lower())
    if not match:
        raise LabError(f"rate '{text}' is not a number with kbit, mbit or gbit behind it, such as 100mbit")
    rate = float(match[1]) * _UNITS[match[2]]
    if not RATE_RANGE[0] <= rate <= RATE_RANGE[1]:
        raise LabError(f"rate '{text}' is not between 100kbit and 100gbit")
    return rate


def require() -> None:
    """Raises LabError where no lab can be made."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise LabError(f"{' and '.join(missing)} not found: install the package iproute2")
    if os.geteuid() != 0:
        raise LabError("network namespaces need root: run it as root, for instance with sudo")


def run(*command: str, check: bool = True) -> str:
    """What a command prints. It is out of reach of the terminal's Ctrl-C."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if check and done.returncode != 0:
        raise LabError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One host: its namespace, its interface's address and its port on the switch."""

    namespace: str
    address: str
    port: str


@dataclass(frozen=True)
class Traffic:
    """What has crossed one host's interface, headers included, and what was dropped at either end of its link."""

    host: int
    rate_bits: int
    sent_bytes: int
    received_bytes: int
    dropped_packets: int


class Lab:
    """The hosts and links of one lab, while the `with` block lasts. At its end, all that runs inside is killed.

    Args:
        rates: of each host's link, bit/s.

    Raises:
        LabError: without root or iproute2, or what `ip` and `tc` said.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        if not 1 <= len(rates) <= MOST_HOSTS:
            raise LabError(f"a lab has 1 to {MOST_HOSTS} hosts, not {len(rates)}")
        self.id = secrets.token_hex(3)
        self.rates = list(rates)
        self.hosts = [Host(f"tw{self.id}-h{i}", f"{SUBNET}.{i + 1}", f"p{i}") for i in range(len(rates))]
        self.folder = STATE / f"{self.id}-{os.getpid()}-{_start_time(os.getpid())}"
        self._switch = f"tw{self.id}-switch"

    def __enter__(self) -> "Lab":
        require()
        try:
            with held():
                self.folder.mkdir(parents=True)
                self._build()
        except BaseException:  # a signal that was held is raised here
            with held():
                _remove(self.folder)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with held():
            _remove(self.folder)

    def set_rates(self, rates: Sequence[float]) -> None:
        """Changes the links of the living lab. New connections make full use of it; old ones keep their packet size."""
        if len(rates) != len(self.hosts):
            raise LabError(f"{len(rates)} rates for {len(self.hosts)} hosts")
        self.rates = list(rates)
        self._shape("change")

    def traffic(self) -> list[Traffic]:
        """What has crossed each host's interface so far.

        The counters are those of the shapers, not the interface's: a veth counts the headers of a large packet once,
        the shaper counts those of every frame that a real link would carry.
        """
        rows = []
        ports = {row["dev"]: row for row in self._counters(self._switch)}
        for i, host in enumerate(self.hosts):
            here = next(row for row in self._counters(host.namespace) if row["dev"] == "eth0")
            there = ports[host.port]
            drops = here["drops"] + there["drops"]
            rows.append(Traffic(i, int(self.rates[i]), here["bytes"], there["bytes"], drops))
        return rows

    def popen(self, host: int, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Starts a command on a host, in a session of its own; it dies with this process. Options: as Popen."""
        parent = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        if threading.current_thread() is not threading.main_thread():
            raise LabError("start commands from the main thread: they die with the thread that started them")
        full = ["ip", "netns", "exec", self.hosts[host].namespace, *command]
        return subprocess.Popen(full, preexec_fn=prepare, start_new_session=True, **options)

    def signal(self, number: int) -> None:
        """Signals every process on the hosts."""
        _signal([host.namespace for host in self.hosts], number)

    def _build(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        run("ip", "-n", self._switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        for host in self.hosts:
            run("ip", "netns", "add", host.namespace)
            pair = ["link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace]
            run("ip", "-n", self._switch, *pair)
            # Without IPv6 addresses nothing chatters on an idle link.
            run("ip", "-n", self._switch, "link", "set", host.port, "addrgenmode", "none", "master", "bridge", "up")
            run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            run("ip", "-n", host.namespace, "link", "set", "eth0", "addrgenmode", "none", "up")
            run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0", "noprefixroute")
            run("ip", "-n", host.namespace, "route", "add", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic")
        self._shape("add")

    def _shape(self, action: str) -> None:
        for host, rate in zip(self.hosts, self.rates, strict=True):
            bytes_per_second = rate / 8
            burst = round(max(16384, bytes_per_second * 0.00026))
            limit = round(burst + max(131072, bytes_per_second * 0.05))
            packet = round(min(65536 - 256, max(8192, bytes_per_second * 0.000064)))
            for namespace, device in ((host.namespace, "eth0"), (self._switch, host.port)):
                run("ip", "-n", namespace, "link", "set", "dev", device, "gso_max_size", str(packet))
                tbf = ["tbf", "rate", f"{round(rate)}bit", "burst", str(burst), "limit", str(limit)]
                run("tc", "-n", namespace, "qdisc", action, "dev", device, "root", *tbf)

    @staticmethod
    def _counters(namespace: str) -> list[dict]:
        rows = json.loads(run("tc", "-n", namespace, "-j", "-s", "qdisc", "show"))
        return [row for row in rows if row["kind"] == "tbf"]


def collect_garbage() -> int:
    """Removes the labs whose owner is gone, with all that runs in them. Returns how many."""
    require()
    gone = []
    for folder in STATE.glob("*-*-*"):
        _, pid, start = folder.name.split("-")
        if _start_time(int(pid)) != start:
            gone.append(folder)
    with held():
        for folder in gone:
            _remove(folder)
    return len(gone)


def _start_time(pid: int) -> str | None:
    """When a process started, which tells it from a later one of the same number. None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _signal(namespaces: Sequence[str], number: int) -> bool:
    """Signals every process in the namespaces; whether there was one."""
    pids = [pid for name in namespaces for pid in run("ip", "netns", "pids", name, check=False).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
    return bool(pids)


def _remove(folder: Path) -> None:
    """Kills what runs in a lab's namespaces and removes them with their interfaces; last its folder."""
    prefix = f"tw{folder.name.split('-')[0]}-"
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.startswith(prefix)]
    deadline = time.monotonic() + 5
    while _signal(names, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)
    for name in names:
        run("ip", "netns", "del", name, check=False)
    shutil.rmtree(folder, ignore_errors=True)
