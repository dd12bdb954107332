"""Jobs of one process on the coordinator of another.

remote.RemoteBackend     what a Coordinator.attach() asks: calls of the local socket, and news that come back
  |  coordinator/local_socket
desk.Desk                answers them: kept jobs to the queue (coordinator/queue), the rest to the engine
  |  session             what one client follows, and the news that it has not had yet
keys                     who may come over the network
"""

# Of the calls between them: raised with every change that the other side would not understand.
VERSION = 1
