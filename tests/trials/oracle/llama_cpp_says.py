"""Loads GGUF files in llama.cpp's server. Answers each JSON line on standard input with a JSON line.

{"model": FILE, "chat": TEXT} is answered with {"text", "finish"}: a greedy answer of at most 20 tokens.

{"model": FILE, "texts": [TEXT]} is answered with {"ids": [[ID]]}: the ids of each text. Special tokens in the text are
parsed, and none are added.
"""

import http.client
import json
import sys

import xllamacpp


def serve(model):
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = 1
    params.n_ctx = 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = 0
    params.warmup = False
    return xllamacpp.Server(params)


def post(server, path, body):
    connection = http.client.HTTPConnection(server.listening_address.split("//")[1].rstrip("/"), timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


for line in sys.stdin:
    request = json.loads(line)
    server = serve(request["model"])
    if "chat" in request:
        body = {"messages": [{"role": "user", "content": request["chat"]}], "max_tokens": 20, "temperature": 0}
        choice = post(server, "/v1/chat/completions", body)["choices"][0]
        print(json.dumps({"text": choice["message"]["content"], "finish": choice["finish_reason"]}), flush=True)
    else:
        ids = [post(server, "/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"] for text in request["texts"]]
        print(json.dumps({"ids": ids}), flush=True)
    del server
