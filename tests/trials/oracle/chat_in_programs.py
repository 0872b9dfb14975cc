"""Sends a chat message to `tessera serve` and to transformers' generate(), with the model folder's settings.

    chat_in_programs.py PROGRAM DIR MESSAGE

Prints {"serve": {"text", "finish"}, "transformers": {"tokens", "text"}}.
"""

import http.client
import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

program, folder, message = sys.argv[1:]
messages = [{"role": "user", "content": message}]

server = subprocess.Popen([program, "serve", "--model", folder, "--port", "0"], stderr=subprocess.PIPE, text=True)
try:
    line = next(line for line in server.stderr if " at http://" in line)
    connection = http.client.HTTPConnection(line.split(" at http://")[1].split("/")[0], timeout=60)
    body = json.dumps({"messages": messages, "max_tokens": 30, "temperature": 0})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    choice = json.loads(connection.getresponse().read())["choices"][0]
finally:
    server.terminate()
    server.communicate(timeout=60)

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
generated = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
print(
    json.dumps(
        {
            "serve": {"text": choice["message"]["content"], "finish": choice["finish_reason"]},
            "transformers": {"tokens": generated, "text": tokenizer.decode(generated, skip_special_tokens=True)},
        }
    )
)
