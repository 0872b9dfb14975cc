"""Renders chats with the code of transformers: chat_oracle.py OUT.json CASES.json NAME=TEMPLATE_FILE ...

OUT.json has {NAME: {"CASE/PROMPT": RENDERED}}, where PROMPT is 1 with add_generation_prompt and 0 without. RENDERED is
{"text", "spans": [[BEGIN, END]]} or {"error"}. The spans are those of assistant tokens, in bytes. If Jinja2 cannot
compile a template, NAME has {"syntax_error"} instead.
"""
import json
import sys

from transformers.utils import chat_template_utils

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a <city> & its \"surroundings\"",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Name of the city"},
            "days": {"type": "integer", "minimum": 1, "default": 2},
            "scale": {"type": "number"},
            "mode": {"type": "string", "enum": ["fast", "exact"]},
            "list": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object", "properties": {"zip": {"type": ["string", "null"]}}, "required": ["zip"]}},
            "required": ["city"]},
        "return": {"type": "string"}}},
    {"type": "function", "function": {"name": "now", "description": "Zeit, auf Deutsch: für Jüngere",
                                      "parameters": {"type": "object", "properties": {}}}},
]
EXTRA = {"bos_token": "<s>", "eos_token": "</s>"}


def bytes_at(text, characters):
    return len(text[:characters].encode())


def render(template, case, prompt):
    values = dict(EXTRA, **case.get("extra", {}))
    has_spans = "{% generation" in template or "{%- generation" in template
    try:
        rendered, spans = chat_template_utils.render_jinja_template(
            conversations=[case["messages"]], tools=TOOLS if case.get("tools") else None, chat_template=template,
            add_generation_prompt=prompt, return_assistant_tokens_mask=has_spans, **values)
        text = rendered[0]
        text.encode()
    except Exception as error:  # a template can raise any exception
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "spans": [[bytes_at(text, a), bytes_at(text, b)] for a, b in (spans[0] if has_spans else [])]}


def main():
    out, cases_path, *templates = sys.argv[1:]
    with open(cases_path, encoding="utf-8") as file:
        cases = json.load(file)
    result = {"": {"tools": TOOLS, "extra": EXTRA}}
    for name, path in (t.split("=", 1) for t in templates):
        with open(path, encoding="utf-8", newline="") as file:
            template = file.read()
        try:
            chat_template_utils._compile_jinja_template(template)
        except Exception as error:
            result[name] = {"syntax_error": str(error)}
            continue
        result[name] = {f"{case['name']}/{prompt}": render(template, case, bool(prompt)) for case in cases for prompt in (0, 1)}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
