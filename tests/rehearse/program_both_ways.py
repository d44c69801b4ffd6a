"""On two hosts: short questions and answers, then 400,000 bytes each way at once; what TCP then has sent twice."""

import json
import os
import socket
import threading
import time
from pathlib import Path

rank, port = int(os.environ["RANK"]), 5000
if rank == 0:
    with socket.create_server(("", port)) as server:
        link, _ = server.accept()
else:
    while True:
        try:
            link = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=240)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)


def exchange(size: int) -> None:
    sender = threading.Thread(target=link.sendall, args=(bytes(size),))
    sender.start()
    while size:
        size -= len(link.recv(min(size, 1 << 16)))
    sender.join()


for _ in range(20):
    exchange(10)
exchange(400_000)
names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
print("found:", json.dumps(int(values[names.index("RetransSegs")])))
