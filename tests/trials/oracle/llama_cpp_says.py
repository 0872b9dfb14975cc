"""What llama.cpp's server says to GGUF files: llama_cpp_says.py, with lines of JSON on standard input.

{"model": FILE, "chat": TEXT}: {"text", "finish"} of a greedy answer of at most 20 tokens.
{"model": FILE, "texts": [TEXT]}: {"ids": [[ID]]} of each, special tokens parsed, none added.
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
    asked = json.loads(line)
    server = serve(asked["model"])
    if "chat" in asked:
        body = {"messages": [{"role": "user", "content": asked["chat"]}], "max_tokens": 20, "temperature": 0}
        choice = post(server, "/v1/chat/completions", body)["choices"][0]
        print(json.dumps({"text": choice["message"]["content"], "finish": choice["finish_reason"]}), flush=True)
    else:
        ids = [post(server, "/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"] for text in asked["texts"]]
        print(json.dumps({"ids": ids}), flush=True)
    del server
