"""A server of a GGUF file and clients of it: both halves of bench/serve_bench.cc.

    serve.py tessera MODEL.gguf DTYPE      `tessera serve` (TESSERA_PROGRAM); DTYPE: its --dtype, or "" for its default
    serve.py llama.cpp MODEL.gguf CLIENTS  llama.cpp's server, in the wheel xllamacpp, with a slot for each of CLIENTS

Answers each line {"prompts": [TEXT], "new": N}: a client for each prompt asks for N greedy tokens, all at once, over
HTTP. {"seconds": from the first request to the last answer, "texts": [TEXT]}.
"""

import concurrent.futures
import http.client
import json
import os
import subprocess
import sys
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


def complete(port, prompt, new):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    assert answer["usage"]["completion_tokens"] == new, answer["usage"]
    return answer["choices"][0]["text"]


def answer(line, port):
    request = json.loads(line)
    with concurrent.futures.ThreadPoolExecutor(len(request["prompts"])) as pool:
        begin = time.perf_counter()
        texts = list(pool.map(lambda prompt: complete(port, prompt, request["new"]), request["prompts"]))
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "texts": texts}


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
