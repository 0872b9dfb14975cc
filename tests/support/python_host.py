"""Runs scripts for a test that needs several: what they import is imported once, then each is a fork.

Reads a JSON object a line on standard input, {"script", "arguments", "input", "out", "err", "seconds"}: the script's
path and words, the files of its standard streams, and after how long it is killed. Answers each with a line, the exit
code, 128 + n where signal n ended it. Ends with its input.

With the path of a socket it is there for all tests: each connection is one request and its answer.
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


def import_what_it_imports(script):
    """Of other packages; what lies beside the script is its own. torch.optim brings torch._dynamo, at its first step."""
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
            pass  # the script prints its error itself


def run(request):
    """In the fork."""
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
    """One that is asked for in a line of JSON; where it leads a group, what it starts is killed with it."""

    def __init__(self, line, leads_group):
        request = json.loads(line)
        import_what_it_imports(pathlib.Path(request["script"]))
        self.deadline = time.monotonic() + request["seconds"]
        self.child = os.fork()
        if leads_group:
            os.setpgid(self.child, self.child)  # in the fork: its own group
        if self.child == 0:
            run(request)
        self.kill = os.killpg if leads_group else os.kill

    def answer(self):
        """Its exit code as a line, None while it runs. Kills it where its time is over."""
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
    """Who asks over a connection, and the script that runs for it."""

    def __init__(self, connection):
        self.connection, self.text, self.script = connection, b"", None

    def hear(self):
        """False when it is gone."""
        heard = self.connection.recv(1 << 16)
        self.text += heard
        if self.script is None and self.text.endswith(b"\n"):
            self.script = Script(self.text, leads_group=True)
        return bool(heard)


def serve(path, idle=20):
    """Several tests at once, each with a connection of its own, until nobody has asked for `idle` seconds."""
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.listen(64)
    clients, asked = {}, time.monotonic()
    while clients or time.monotonic() < asked + idle:
        running = any(client.script for client in clients.values())
        for ready in select.select([listener, *clients], [], [], 0.005 if running else 1)[0]:
            if ready is listener:
                connection = listener.accept()[0]
                clients[connection] = Client(connection)
            elif not clients[ready].hear():
                if clients[ready].script:
                    clients[ready].script.end()
                clients.pop(ready).connection.close()
        for connection, client in list(clients.items()):
            answer = client.script and client.script.answer()
            if answer:
                connection.sendall(answer)
                clients.pop(connection).connection.close()
        asked = time.monotonic() if clients else asked
    os.unlink(path)


def answer_lines():
    """What is asked on standard input, one after another."""
    for line in iter(sys.stdin.readline, ""):
        script = Script(line, leads_group=False)
        while not (answer := script.answer()):
            time.sleep(0.005)
        print(answer.decode(), end="", flush=True)


if len(sys.argv) > 1:
    serve(sys.argv[1])
else:
    answer_lines()
