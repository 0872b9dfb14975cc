"""A server of a GGUF file and clients of it: both halves of bench/serve_bench.cc.

    serve.py tessera MODEL.gguf DTYPE      `tessera serve` (TESSERA_PROGRAM); DTYPE: its --dtype, or "" for its default
    serve.py llama.cpp MODEL.gguf CLIENTS  llama.cpp's server, in the wheel xllamacpp, with a slot for each of CLIENTS

Answers each line {"prompts": [TEXT], "new": N}: a client for each prompt asks for N greedy tokens, all at once, over
HTTP. {"seconds": from the first request to the last answer, "delay": the mean of a client's, "texts": [TEXT]}.
With "hostile": FILE, other clients are there meanwhile: 256 connections that send nothing, and one for each line
{"path": PATH, "body": OBJECT} of FILE that sends this and does not read the answer.
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


class Hostile:
    """Comes again whenever a connection was answered or shut."""

    def __init__(self, port, file):
        self.texts = [b""] * 256
        for line in open(file, encoding="utf-8"):
            request = json.loads(line)
            body = json.dumps(request["body"]).encode()
            head = f"POST {request['path']} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            self.texts.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.port, self.ending, self.there = port, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        sockets = [None] * len(self.texts)
        while not self.ending.is_set():
            for i, text in enumerate(self.texts):
                if sockets[i] is None or select.select([sockets[i]], [], [], 0)[0]:
                    if sockets[i] is not None:
                        sockets[i].close()
                    sockets[i] = socket.create_connection(("127.0.0.1", self.port))
                    try:
                        sockets[i].sendall(text)
                    except OSError:
                        pass  # refused already
            self.there.set()
            self.ending.wait(0.05)
        for each in sockets:
            each.close()

    def __enter__(self):
        self.thread.start()
        self.there.wait()

    def __exit__(self, *_):
        self.ending.set()
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
    beside = Hostile(port, request["hostile"]) if request.get("hostile") else contextlib.nullcontext()
    with beside, concurrent.futures.ThreadPoolExecutor(len(request["prompts"])) as pool:
        begin = time.perf_counter()
        answers = list(pool.map(lambda prompt: complete(port, prompt, request["new"]), request["prompts"]))
        seconds = time.perf_counter() - begin
    texts, delays = zip(*answers)
    return {"seconds": seconds, "delay": sum(delays) / len(delays), "texts": texts}


def main():
    kind, model, how = sys.argv[1:4]
    server, port = tessera(model, how) if kind == "tessera" else llama_cpp(model, how)
    try:
        for line in sys.stdin:
            print(json.dumps(answer(line, port)), flush=True)
    finally:
        if kind == "tessera":
            server.terminate()
            server.wait()


main()
