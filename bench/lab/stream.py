"""What a TCP connection gets out of a lab's link: a long stream, then messages on the idle link.

    bench/netlab --hosts 2 --rate 100mbit -- python3 bench/lab/stream.py

Rank 1 sends to rank 0.
"""

import argparse
import os
import socket
import statistics
import time

PORT = 29501
MESSAGE = 120_000  # bytes
MESSAGES = 15
CHUNK = bytes(1 << 20)
WARM_UP = 0.5  # seconds that do not count


def send(seconds: float) -> None:
    """Rank 1: streams, then sends messages one by one."""
    for _ in range(500):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    else:
        raise SystemExit("stream: rank 0 does not listen")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end = time.monotonic() + WARM_UP + seconds
    while time.monotonic() < end:
        connection.sendall(CHUNK[:65536])
    connection.sendall(b"x")  # the stream's end
    connection.recv(1)
    times = []
    for _ in range(MESSAGES):
        time.sleep(0.05)
        begin = time.monotonic()
        connection.sendall(CHUNK[:MESSAGE])
        connection.recv(1)
        times.append(1e3 * (time.monotonic() - begin))
    print(f"{MESSAGE / 1e3:.0f} kB on the idle link: {statistics.median(times):.2f} ms (median of {MESSAGES})")


def receive(seconds: float) -> None:
    """Rank 0: measures the stream, acknowledges the messages."""
    connection = socket.create_server(("", PORT)).accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 20)
    start, first, count, last = time.monotonic(), None, 0, 0.0
    while True:
        size = connection.recv_into(buffer)
        now = time.monotonic()
        if size == 0 or buffer[size - 1] == ord("x"):
            break
        if first is None and now - start > WARM_UP:
            first = now
        elif first is not None and now - first <= seconds:
            count, last = count + size, now
    if first is None or last <= first:
        raise SystemExit("stream: too short to measure")
    print(f"stream: {count * 8 / (last - first) / 1e6:.1f} Mbit/s of payload")
    connection.sendall(b"x")
    for _ in range(MESSAGES):
        left = MESSAGE
        while left:
            left -= connection.recv_into(buffer, left)
        connection.sendall(b"x")


def main() -> None:
    """Rank 0 receives, rank 1 sends, others have nothing to do."""
    parser = argparse.ArgumentParser(description="Measure a TCP stream from rank 1 to rank 0 of a lab.")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of the stream (default 2)")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if rank < 2:
        (receive, send)[rank](args.seconds)


if __name__ == "__main__":
    main()
