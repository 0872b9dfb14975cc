"""Renders one-line templates with transformers' Jinja2: snippet_oracle.py OUT.json SNIPPETS.txt

Each line of SNIPPETS.txt is a template. OUT.json has a list with {"text"} or {"error"} for each.
"""
import json
import sys

from transformers.utils import chat_template_utils

MESSAGES = json.loads("""[
    {"role": "user", "content": "hi", "nothing": null, "big": 12345678901234567890123, "unsigned": 18446744073709551615,
     "low": -98765432109876543210, "endless": 1e400, "low_endless": -1E999},
    {"role": "assistant", "content": "ho"}]""")


def render(source):
    try:
        template = chat_template_utils._compile_jinja_template(source)
        text = template.render(messages=MESSAGES, tools=None, documents=None, add_generation_prompt=True)
        text.encode()
        return {"text": text}
    except Exception as error:  # a template can raise any exception
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    out, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        snippets = file.read().split("\n")
    with open(out, "w", encoding="utf-8") as file:
        json.dump([render(snippet) for snippet in snippets], file)


if __name__ == "__main__":
    main()
