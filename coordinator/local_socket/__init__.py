"""The private socket of a running coordinator: other processes of the same user ask, and are answered.

`coremill top` looks through it, `Coordinator.attach` submits through it. It is a ROUTER on a socket file in a folder
of mode 0700, as the workers' is (coordinator/transport.py), beside a record for those who look for it. The folder is
locked for as long as its owner lives; what a killed one leaves is swept by the next.

    with LocalServer("up", "smollm2", {"stats": lambda fields: engine.stats()}) as server: ...
    with LocalClient(running()[0].address) as client: client.call("stats")
"""

from coremill.coordinator.local_socket.client import LocalClient
from coremill.coordinator.local_socket.records import Record, running
from coremill.coordinator.local_socket.server import LocalServer

__all__ = ["LocalClient", "LocalServer", "Record", "running"]
