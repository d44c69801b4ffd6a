"""On hosts 0, 1 and 2: a round trip of 0 and 1, one of 0 and 2, and a megabyte from 0 to 1, in seconds by rank 0."""

import json
import os
import socket
import time

rank, port = int(os.environ["RANK"]), 5000
address = os.environ["MASTER_ADDR"]


def exactly(connection: socket.socket, size: int) -> None:
    while size:
        size -= len(connection.recv(min(size, 1 << 16)))


if rank == 0:
    with socket.create_server(("", port)) as server:
        links = dict(sorted((int(link.recv(1)), link) for link, _ in (server.accept() for _ in range(2))))
    seconds = []
    for peer, size in ((1, 1), (2, 1), (1, 1_000_000)):
        begin = time.perf_counter()
        links[peer].sendall(bytes(size))
        exactly(links[peer], 1)
        seconds.append(time.perf_counter() - begin)
    print("found:", json.dumps(seconds))
else:
    while True:
        try:
            link = socket.create_connection((address, port), timeout=240)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.sendall(str(rank).encode())
    for size in (1, 1_000_000) if rank == 1 else (1,):
        exactly(link, size)
        link.sendall(b"x")
