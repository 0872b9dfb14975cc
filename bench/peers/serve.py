"""Starts a server for a GGUF file and sends it requests. bench/serve_bench.cc runs it for `tessera serve` and for the
peer.

    serve.py tessera MODEL.gguf DTYPE      `tessera serve` (TESSERA_PROGRAM); DTYPE: its --dtype, or "" for its default
    serve.py llama.cpp MODEL.gguf CLIENTS  llama.cpp's server, from the wheel xllamacpp, with one slot per client

A request is {"prompts": [TEXT], "new": N}. One client per prompt asks for N greedy tokens over HTTP, all at the same
time. The answer is {"seconds": from the first request to the last answer, "delay": mean latency of a client, "texts":
[TEXT]}.

With "hostile": FILE, hostile clients are connected during the request: 256 connections that send nothing, and one
connection for each line {"path": PATH, "body": OBJECT} of FILE, which sends this HTTP request and does not read the
response.
"""

import concurrent.futures
import contextlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

CONTEXT = 2048


def tessera(model, dtype):
    command = [os.environ["TESSERA_PROGRAM"], "serve", "--model", model, "--name", "model", "--port", "0"]
    server = subprocess.Popen(command + (["--dtype", dtype] if dtype else []), stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if " at http://" in line:
            return server, int(line.split("http://")[1].split("/")[0].split(":")[1])
    raise RuntimeError("tessera serve ended")


def llama_cpp(model, clients):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"model"}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = int(clients)
    params.n_ctx = CONTEXT * int(clients)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.verbosity = 0
    server = xllamacpp.Server(params)
    return server, int(server.listening_address.rsplit(":", 1)[1].strip("/"))


class HostileClients:
    """Opens a connection again when the server has answered or closed it."""

    def __init__(self, port, file):
        self.texts = [b""] * 256
        for line in open(file, encoding="utf-8"):
            request = json.loads(line)
            body = json.dumps(request["body"]).encode()
            head = f"POST {request['path']} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            self.texts.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.port, self.stopping, self.connected = port, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        sockets = [None] * len(self.texts)
        while not self.stopping.is_set():
            for i, text in enumerate(self.texts):
                if sockets[i] is None or select.select([sockets[i]], [], [], 0)[0]:
                    if sockets[i] is not None:
                        sockets[i].close()
                    sockets[i] = socket.create_connection(("127.0.0.1", self.port))
                    try:
                        sockets[i].sendall(text)
                    except OSError:
                        pass  # the server has closed the connection
            self.connected.set()
            self.stopping.wait(0.05)
        for each in sockets:
            each.close()

    def __enter__(self):
        self.thread.start()
        self.connected.wait()

    def __exit__(self, *_):
        self.stopping.set()
        self.thread.join()


def complete(port, prompt, new):
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    assert answer["usage"]["completion_tokens"] == new, answer["usage"]
    return answer["choices"][0]["text"], time.perf_counter() - begin


def answer(line, port):
    request = json.loads(line)
    hostile_clients = HostileClients(port, request["hostile"]) if request.get("hostile") else contextlib.nullcontext()
    with hostile_clients, concurrent.futures.ThreadPoolExecutor(len(request["prompts"])) as pool:
        begin = time.perf_counter()
        answers = list(pool.map(lambda prompt: complete(port, prompt, request["new"]), request["prompts"]))
        seconds = time.perf_counter() - begin
    texts, delays = zip(*answers)
    return {"seconds": seconds, "delay": sum(delays) / len(delays), "texts": texts}


def main():
    server_kind, model, option = sys.argv[1:4]
    server, port = tessera(model, option) if server_kind == "tessera" else llama_cpp(model, option)
    try:
        for line in sys.stdin:
            print(json.dumps(answer(line, port)), flush=True)
    finally:
        if server_kind == "tessera":
            server.terminate()
            server.wait()


main()
