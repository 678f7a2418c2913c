"""Imports moto once; then forks an S3 server for each connection to stdin, a listening socket.

`s3_servers.py PID`. Each connection gets the port of its server. When the client closes its side, the server
sends its CPU seconds (the first one includes the imports) and ends. All servers end with the process PID,
which runs the tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import Client

_PR_SET_PDEATHSIG = 1


def _serve(connection: socket.socket, application: DomainDispatcherApplication, spent: float) -> NoReturn:
    """Be a server until the other side of the connection has no more to send."""

    def end() -> None:
        try:
            connection.recv(1)
            connection.sendall(str(spent + time.process_time()).encode())
        finally:
            os._exit(0)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=end).start()
    connection.sendall(str(server.server_port).encode())
    server.serve_forever()
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a server has ended
    application = DomainDispatcherApplication(create_backend_app)
    # moto looks through its own folder for each request, for a service with the name of the host.
    vars(application)["get_backend_for_host"] = functools.cache(application.get_backend_for_host)
    Client(application).get("/")  # makes what the first request makes
    listener = socket.socket(fileno=os.dup(0))
    tests = os.pidfd_open(int(sys.argv[1]))
    events = select.poll()
    events.register(listener, select.POLLIN)
    events.register(tests, select.POLLIN)
    spent = 0.0
    while tests not in dict(events.poll()):
        connection, _ = listener.accept()
        used, spent = time.process_time() - spent, time.process_time()
        if os.fork() == 0:
            listener.close()
            _serve(connection, application, used)
        connection.close()


if __name__ == "__main__":
    main()
