"""Python programs that start with PyTorch loaded; each rank of a test would load it for 1.5 s of CPU time.

    preloaded.py --serve SOCKET
    preloaded.py SOCKET [-m MODULE | -c CODE | SCRIPT.py] ARGUMENTS...

The first command loads PyTorch, and forks a process for each of the second, which runs the program with the
arguments, environment, directory and files of the second command. That one passes signals on, and ends as the program
does. All programs that are forked have the same seed of hashes; nightly tests start plain Python instead.
"""

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys

LENGTH = struct.Struct("!I")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LOADED = ("numpy.ma", "torch", "torch._subclasses.schema_check_mode", "torch.distributed.checkpoint.state_dict",
          "torch.distributed.nn.functional", "torch.nn.parallel", "torch.profiler", "slurmdl.train.library.startup",
          "slurmdl.train.trainer.trainer", "slurmdl.train.transports.torch_distributed")


def receive(connection, size):
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def run_as_client(path, arguments):
    """Ask the server for a process; end as it does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps({"argv": arguments, "environ": dict(os.environ), "directory": os.getcwd()}).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    socket.send_fds(connection, [LENGTH.pack(len(request))], [0, 1, 2])
    connection.sendall(request)
    pid, = LENGTH.unpack(receive(connection, LENGTH.size))
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = receive(connection, LENGTH.size)
    code = os.waitstatus_to_exitcode(LENGTH.unpack(status)[0]) if status else -signal.SIGKILL
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path):
    """Fork a process for each request; return its arguments in the new process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    events = selectors.DefaultSelector()
    for source in (0, ended, listener):
        events.register(source, selectors.EVENT_READ)
    clients = {}
    print("ready", flush=True)
    while True:
        for event, _ in events.select():
            if event.fileobj == 0:  # the test session has ended
                for pid in clients:
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(os.path.dirname(path))
                os._exit(0)
            elif event.fileobj == ended:
                os.read(ended, 512)
                for pid, client in list(clients.items()):
                    if (result := os.waitpid(pid, os.WNOHANG))[0]:
                        del clients[pid]
                        if client in events.get_map():
                            events.unregister(client)
                        with contextlib.suppress(OSError):  # the client was killed
                            client.sendall(LENGTH.pack(result[1]))
                        client.close()
            elif event.fileobj is listener:
                client = listener.accept()[0]
                head, files, _, _ = socket.recv_fds(client, LENGTH.size, 3)
                text = receive(client, LENGTH.unpack(head)[0]) if head else b""
                if not text.endswith(b"}"):  # the client was killed
                    client.close()
                    continue
                request = json.loads(text)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for source in (events, listener, client, *clients.values()):
                        source.close()
                    os.close(ended)
                    os.close(wake)
                    become(request, files)
                    return request["argv"]
                for file in files:
                    os.close(file)
                clients[pid] = client
                events.register(client, selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    client.sendall(LENGTH.pack(pid))
            elif event.fileobj in clients.values() and not event.fileobj.recv(1):  # the client was killed
                events.unregister(event.fileobj)
                os.kill(next(pid for pid, client in clients.items() if client is event.fileobj), signal.SIGKILL)


def become(request, files):
    """Take over environment, directory and files of a client."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    known, wanted = (environ.get("PYTHONPATH", "").split(os.pathsep) for environ in (os.environ, request["environ"]))
    sys.path[1:1] = [path for path in wanted if path not in known]
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    if "OMP_NUM_THREADS" in os.environ:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


if sys.argv[1] != "--serve":
    run_as_client(sys.argv[1], sys.argv[2:])

for name in LOADED:
    importlib.import_module(name)
arguments = serve(sys.argv[2])
if arguments[0] in ("-m", "-c"):
    sys.argv[:] = arguments[1:]
    sys.path[0] = ""
else:
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
if arguments[0] == "-m":
    runpy._run_module_as_main(arguments[1])
else:
    if arguments[0] != "-c":
        __file__ = arguments[0]
    code = arguments[1] if arguments[0] == "-c" else pathlib.Path(arguments[0]).read_text()
    exec(compile(code, "<string>" if arguments[0] == "-c" else arguments[0], "exec"))
