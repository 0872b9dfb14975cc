"""Runs Python scripts for tests. It imports the modules that the scripts import once, and runs each script in a fork.

    python_host.py [SOCKET]

Without SOCKET it reads requests on standard input, one JSON object per line, and ends at the end of the input. A
request is {"script", "arguments", "input", "out", "err", "seconds"}: the script's path and arguments, the files for its
standard streams, and the time after which it is killed. The answer is a line with the exit code, or 128 + n if signal n
ended the script.

With SOCKET it listens on this Unix socket and serves all tests. Each connection is one request and its answer.
"""
import ast
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import sys
import time


IMPORTED = set()


def preload_imports(script):
    """Imports the packages that the script imports, except modules in the script's own folder. With torch.optim it also
    imports torch._dynamo, which an optimizer imports at its first step."""
    text = script.read_text()
    for node in ast.parse(text + ("\nimport torch._dynamo" if "torch.optim" in text else "")).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "level", 0):
            continue
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module]
        roots = [module.split(".")[0] for module in modules]
        statement = ast.unparse(node)
        if statement in IMPORTED or any((script.parent / root).exists() or (script.parent / f"{root}.py").exists() for root in roots):
            continue
        IMPORTED.add(statement)
        try:
            exec(statement, {})
        except ImportError:
            pass  # the script raises the same error and prints it


def run(request):
    """Runs the script in the forked process and ends the process."""
    for number, (name, flags) in enumerate([("input", os.O_RDONLY), ("out", os.O_WRONLY), ("err", os.O_WRONLY)]):
        os.dup2(os.open(request[name], flags), number)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(pathlib.Path(request["script"]).parent)
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Script:
    """A running script. With `leads_group` it is a process group, so that its children are killed with it."""

    def __init__(self, line, leads_group):
        request = json.loads(line)
        preload_imports(pathlib.Path(request["script"]))
        self.deadline = time.monotonic() + request["seconds"]
        self.child = os.fork()
        if leads_group:
            os.setpgid(self.child, self.child)  # both processes call this, so that the group exists for both
        if self.child == 0:
            run(request)
        self.kill = os.killpg if leads_group else os.kill

    def answer(self):
        """Returns the exit code as a line, or None while the script runs. Kills the script when its time is over."""
        done, status = os.waitpid(self.child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return b"%d\n" % (code if code >= 0 else 128 - code)
        if time.monotonic() > self.deadline:
            self.kill(self.child, signal.SIGKILL)
            self.deadline += 3600
        return None

    def end(self):
        self.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)


class Client:
    """A connection, and the script that runs for it."""

    def __init__(self, connection):
        self.connection, self.text, self.script = connection, b"", None

    def receive(self):
        """Reads from the connection. Returns False when the client has closed it."""
        received = self.connection.recv(1 << 16)
        self.text += received
        if self.script is None and self.text.endswith(b"\n"):
            self.script = Script(self.text, leads_group=True)
        return bool(received)


def serve(path, idle=20):
    """Serves several clients at the same time. Returns after `idle` seconds without a client."""
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.listen(64)
    clients, last_active = {}, time.monotonic()
    while clients or time.monotonic() < last_active + idle:
        running = any(client.script for client in clients.values())
        for ready in select.select([listener, *clients], [], [], 0.005 if running else 1)[0]:
            if ready is listener:
                connection = listener.accept()[0]
                clients[connection] = Client(connection)
            elif not clients[ready].receive():
                if clients[ready].script:
                    clients[ready].script.end()
                clients.pop(ready).connection.close()
        for connection, client in list(clients.items()):
            answer = client.script and client.script.answer()
            if answer:
                connection.sendall(answer)
                clients.pop(connection).connection.close()
        last_active = time.monotonic() if clients else last_active
    os.unlink(path)


def answer_lines():
    """Answers the requests on standard input, one after another."""
    for line in iter(sys.stdin.readline, ""):
        script = Script(line, leads_group=False)
        while not (answer := script.answer()):
            time.sleep(0.005)
        print(answer.decode(), end="", flush=True)


if len(sys.argv) > 1:
    serve(sys.argv[1])
else:
    answer_lines()
