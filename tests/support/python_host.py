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
            pass  # the script says so itself


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


def wait_for(child, seconds):
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline += 3600
        time.sleep(0.005)


def reply(line):
    """To what is asked on standard input: one after another."""
    request = json.loads(line)
    import_what_it_imports(pathlib.Path(request["script"]))
    child = os.fork()
    if child == 0:
        run(request)
    code = wait_for(child, request["seconds"])
    print(code if code >= 0 else 128 - code, flush=True)


class Script:
    """One that runs, and who asked for it."""

    def __init__(self, client):
        self.client, self.text, self.child, self.deadline = client, b"", None, None

    def hear(self):
        """False when the client is gone."""
        heard = self.client.recv(1 << 16)
        self.text += heard
        if self.child is None and self.text.endswith(b"\n"):
            request = json.loads(self.text)
            import_what_it_imports(pathlib.Path(request["script"]))
            self.deadline = time.monotonic() + request["seconds"]
            self.child = os.fork()
            if self.child == 0:
                os.setpgid(0, 0)
                run(request)
            os.setpgid(self.child, self.child)
        return bool(heard)

    def ended(self):
        """Whether it has, and then the client knows."""
        if self.child is None:
            return False
        done, status = os.waitpid(self.child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            self.client.sendall(b"%d\n" % (code if code >= 0 else 128 - code))
        elif time.monotonic() > self.deadline:
            self.kill()
            self.deadline += 3600
        return bool(done)

    def kill(self):
        if self.child is not None:
            os.killpg(self.child, signal.SIGKILL)


def serve(path, idle=20):
    """Several tests at once, each with a connection of its own, until nobody has asked for `idle` seconds."""
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.listen(64)
    scripts, asked = {}, time.monotonic()
    while scripts or time.monotonic() < asked + idle:
        running = any(script.child for script in scripts.values())
        for ready in select.select([listener, *scripts], [], [], 0.005 if running else 1)[0]:
            if ready is listener:
                client = listener.accept()[0]
                scripts[client] = Script(client)
            elif not scripts[ready].hear():
                scripts[ready].kill()
                if scripts[ready].child:
                    os.waitpid(scripts[ready].child, 0)
                scripts.pop(ready).client.close()
        for client in [client for client, script in scripts.items() if script.ended()]:
            scripts.pop(client).client.close()
        asked = time.monotonic() if scripts else asked
    os.unlink(path)


if len(sys.argv) > 1:
    serve(sys.argv[1])
else:
    for line in iter(sys.stdin.readline, ""):
        reply(line)
