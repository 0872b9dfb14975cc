"""Sends requests to `tessera serve` with the official OpenAI client and curl. The texts must equal those of
`tessera generate`.

    openai_oracle.py PROGRAM MODEL CLIENTS SECONDS [SERVE_FLAG...]

One of the checks sends requests from CLIENTS clients at the same time, for SECONDS seconds.
"""
import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing

import openai
import pydantic

program, model, clients, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
name = os.path.basename(model)


def start(*more, expect=None):
    server = subprocess.Popen([program, "serve", model, "--port", "0", *sys.argv[5:], *more], stderr=subprocess.PIPE, text=True)
    atexit.register(server.kill)  # if this script fails
    if expect is not None:
        _, err = server.communicate(timeout=120)
        assert server.returncode == expect, (server.returncode, err)
        return err
    for line in server.stderr:
        if " at http" in line:
            url = line.split(" at ")[1].split()[0]
            threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
            return server, url
    raise AssertionError("the server ended without printing its address")


def stop(server):
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0, server.returncode


WORDS = "the cat sat on a mat and said that it was not for you to know".split()


def prompt_of(i):
    draw = random.Random(i)
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 9)))


def answers(verb, rows, *flags):
    run = subprocess.run([program, verb, "--model", model, *flags], input="".join(json.dumps(row) + "\n" for row in rows),
                         text=True, capture_output=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def generate_texts(prompts, max_new_tokens):
    rows = answers("generate", [{"id": i, "prompt": p} for i, p in enumerate(prompts)],
                   "--batch", "-", "--max-new-tokens", str(max_new_tokens), "--temperature", "0")
    assert [row["id"] for row in rows] == list(range(len(prompts)))
    return [row["text"] for row in rows]


def score_texts(texts):
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    return [row["logprobs"] for row in answers("score", rows, "--input", "-", "--output", "-")]


def id_of(text):
    run = subprocess.run([program, "tokenize", "--model", model, "--no-special"], input=text + "\n", text=True,
                         capture_output=True, check=True)
    return run.stdout.strip()


def expect_refusal(status, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert error.status_code == status, (error.status_code, error.message)
        assert error.body["message"] and error.body["type"], error.body
        return error
    raise AssertionError("the server accepted a request that it must refuse")


class Answer(pydantic.BaseModel):
    form: typing.Literal["yes", "no"]  # values without the letters c and d, because they are stop tokens of this model
    flags: typing.Annotated[list[bool], pydantic.Field(max_length=3)]


# Response formats and tools. The client makes them from a pydantic model and parses the answers.
def check_structured_output(client):
    messages = [{"role": "user", "content": "the cat"}]
    for seed in range(4):
        options = {"model": name, "messages": messages, "max_tokens": 200, "seed": seed}
        done = client.chat.completions.parse(**options, response_format=Answer)
        assert isinstance(done.choices[0].message.parsed, Answer), done
        with client.chat.completions.stream(**options, response_format=Answer) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)
        tool = openai.pydantic_function_tool(Answer, name="answer")
        if name != "tiny":
            assert "does not support tools" in expect_refusal(400, lambda: client.chat.completions.parse(**options, tools=[tool])).message
            continue
        for choice in ("required", {"type": "function", "function": {"name": "answer"}}):
            done = client.chat.completions.parse(**options, tools=[tool], tool_choice=choice)
            assert done.choices[0].finish_reason == "tool_calls", done
            call = done.choices[0].message.tool_calls[0].function
            assert call.name == "answer" and isinstance(call.parsed_arguments, Answer), call
            one = client.chat.completions.create(**options, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
            assert len(one.choices[0].message.tool_calls) == 1, one
    expect_refusal(400, lambda: client.chat.completions.create(model=name, messages=messages, response_format={
        "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "a+"}}}))
    expect_refusal(400, lambda: client.chat.completions.create(model=name, messages=messages, tool_choice="required"))


def check_one_client(client):
    assert [m.id for m in client.models.list()] == [name]
    assert client.models.retrieve(name).id == name
    expected = generate_texts(["the cat"], 24)[0]
    done = client.completions.create(model=name, prompt="the cat", max_tokens=24, temperature=0, logprobs=2)
    assert done.choices[0].text == expected, (done.choices[0].text, expected)
    assert done.choices[0].finish_reason in ("length", "stop")
    assert done.usage.completion_tokens == len(done.choices[0].logprobs.tokens)
    text = "".join(part.choices[0].text for part in
                   client.completions.create(model=name, prompt="the cat", max_tokens=24, temperature=0, stream=True))
    assert text == expected
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3)
    entries = chat.choices[0].logprobs.content
    assert len(entries) <= chat.usage.completion_tokens and len(entries[0].top_logprobs) == 3
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == chat.choices[0].message.content, entries
    assert entries[0].token == entries[0].top_logprobs[0].token and entries[0].logprob <= 0
    parts = list(client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0, stream=True,
                                                stream_options={"include_usage": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == chat.choices[0].message.content
    assert parts[-1].usage == chat.usage
    assert all("usage" in part.model_fields_set and part.usage is None for part in parts[:-1]), parts
    assert parts[-2].choices[0].finish_reason == chat.choices[0].finish_reason
    nothing = {key: None for key in ("reasoning_effort", "function_call", "web_search_options", "verbosity", "parallel_tool_calls")}
    same = client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0, extra_body=nothing)
    assert same.choices[0].message == chat.choices[0].message, same
    assert "verbosity" in expect_refusal(400, lambda: client.chat.completions.create(model=name, messages=messages, verbosity="low")).message
    called_by_path = client.completions.create(model=model, prompt="the cat", max_tokens=24, temperature=0)
    assert (called_by_path.choices[0].text, called_by_path.model) == (expected, name)
    for likeliest in (0, 1, 5):
        drawn = client.completions.create(model=name, prompt="the cat", max_tokens=8, temperature=2, seed=1, logprobs=likeliest, echo=True)
        found = drawn.choices[0].logprobs
        for token, logprob, top, offset in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True))[1:]:
            assert top[token] == logprob and likeliest <= len(top) <= likeliest + 1, (token, top)
            assert drawn.choices[0].text[offset:].startswith(token) or token not in drawn.choices[0].text, (token, offset)
    sampled = [client.chat.completions.create(model=name, messages=messages, max_tokens=12, seed=s, temperature=1.5).choices[0].message.content
             for s in (1, 1, 2)]
    assert sampled[0] == sampled[1]
    expect_refusal(404, lambda: client.completions.create(model="other", prompt="a"))
    both = client.completions.create(model=name, prompt=["the cat", "a mat"], n=2, max_tokens=24, temperature=0)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert [c.text for c in both.choices] == [t for t in generate_texts(["the cat", "a mat"], 24) for _ in range(2)]
    texts = ["", ""]
    for part in client.chat.completions.create(model=name, messages=messages, n=2, max_tokens=12, temperature=0, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [chat.choices[0].message.content] * 2, texts
    expect_refusal(400, lambda: client.completions.create(model=name, prompt="a", n=1000))
    biased = client.completions.create(model=name, prompt="the cat", max_tokens=5, temperature=0, logit_bias={id_of("e"): 100})
    assert biased.choices[0].text == "eeeee", biased.choices[0].text
    expect_refusal(400, lambda: client.completions.create(model=name, prompt="a", logit_bias={"1": 101}))
    with_prompt = client.completions.create(model=name, prompt="the cat", max_tokens=24, temperature=0, echo=True)
    assert with_prompt.choices[0].text == "the cat" + expected
    scored = client.completions.create(model=name, prompt=["the cat", "a mat"], max_tokens=0, temperature=0, echo=True, logprobs=1)
    for choice, prompt, expected_logprobs in zip(scored.choices, ["the cat", "a mat"], score_texts(["the cat", "a mat"])):
        found = choice.logprobs
        assert choice.text == "".join(found.tokens) == prompt and choice.finish_reason == "length", choice
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert all(abs(a - b) < 1e-3 for a, b in zip(found.token_logprobs[1:], expected_logprobs, strict=True)), (found, expected_logprobs)
    assert scored.usage.completion_tokens == 0
    assert scored.usage.prompt_tokens == sum(len(choice.logprobs.tokens) for choice in scored.choices)
    expect_refusal(400, lambda: client.completions.create(model=name, prompt="a", max_tokens=10**9))
    too_long = expect_refusal(400, lambda: client.completions.create(model=name, prompt="a " * 20000))
    assert too_long.code == "context_length_exceeded", too_long.body


def check_many_clients(url):
    prompts = [prompt_of(i) for i in range(clients)]
    expected = generate_texts(prompts, 20)
    wrong, count, end = [], [0], time.time() + seconds

    def work(i):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        while True:
            stream = client.completions.create(model=name, prompt=prompts[i], max_tokens=20, temperature=0, stream=True)
            text = "".join(part.choices[0].text for part in stream)
            count[0] += 1
            if text != expected[i]:
                wrong.append((prompts[i], text, expected[i]))
            if time.time() > end:
                return

    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    assert count[0] >= clients
    print(f"{count[0]} answers to {clients} clients")


def curl(url, *more):
    run = subprocess.run(["curl", "-sS", "-w", "\n%{http_code}", *more, url], capture_output=True, text=True, timeout=120)
    body, _, status = run.stdout.rpartition("\n")
    return int(status), body


server, url = start()
check_one_client(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
check_structured_output(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
check_many_clients(url)
root = url.removesuffix("/v1")
status, body = curl(root + "/health")
assert status == 200 and json.loads(body)["running"] == 0, body
request_body = json.dumps({"model": name, "prompt": "the cat", "max_tokens": 3, "temperature": 0})
status, body = curl(url + "/completions", "-H", "Content-Type: application/json", "-d", request_body)
assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 3, body
status, body = curl(url + "/completions", "-H", "Content-Type: application/json", "--data-binary", "@" + program)
assert status == 413 and json.loads(body)["error"]["message"], (status, body)
port = url.split(":")[2].split("/")[0]
port_in_use = subprocess.run([program, "serve", "--model", model, "--port", port], capture_output=True, text=True, timeout=120)
assert port_in_use.returncode == 4 and port in port_in_use.stderr, port_in_use
stop(server)

too_large = start("--cache-tokens", str(2**38), expect=2)
assert "Give fewer --cache-tokens" in too_large, too_large
err = start("--host", "0.0.0.0", expect=2)
assert "--token-file" in err, err
token_file = tempfile.NamedTemporaryFile("w", suffix=".token")  # only its owner can read it, as the server requires
token_file.write("0123456789abcdef0123\n")
token_file.flush()
server, url = start("--token-file", token_file.name)
assert openai.OpenAI(base_url=url, api_key="0123456789abcdef0123").models.list().data[0].id == name
expect_refusal(401, lambda: openai.OpenAI(base_url=url, api_key="0123456789abcdef0124", max_retries=0).models.list())
stop(server)
