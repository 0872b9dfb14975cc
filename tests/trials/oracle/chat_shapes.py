"""Makes random chats and renders them with the code of transformers.

    chat_shapes.py OUT.json SEED CASES_PER_TEMPLATE NAME=TEMPLATE_FILE ...

OUT.json has {NAME: [{"messages", "tools" (optional), "extra", "0": RENDERED, "1": RENDERED, "turns"}]}. "0" is rendered
without a generation prompt, and "1" with it. RENDERED is {"text", "spans": [[BEGIN, END]]} or {"error"}. All positions
are in bytes. "turns" has an entry for each assistant message: its [BEGIN, END) in the text of "0", or null if the
rendered conversation up to this message is not a prefix of the whole text. Words of a message contain the message's
number, such as w3n17e, so that no other message has them.
"""
import json
import random
import sys

from transformers.utils import chat_template_utils

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a <city> & its \"surroundings\"",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Name of the city"},
            "days": {"type": "integer", "minimum": 1, "default": 2}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "description": "Zeit für Jüngere",
                                      "parameters": {"type": "object", "properties": {}}}}]


class ChatGenerator:
    """Makes one random chat."""

    def __init__(self, rng):
        self.rng = rng
        self.messages = []
        self.calls = 0
        self.parts_share = rng.choice([0, 0, 0.4])  # share of message contents that are lists of parts

    def words(self):
        rng, number = self.rng, len(self.messages)
        words = " ".join(f"w{number}n{rng.randrange(1000)}e" for _ in range(rng.randint(1, 3)))
        return rng.choice(["{}", "{}", "{}", " {}\n", "{}\n\n\"quoted\" & <b>", "ü {} 答\n", "a\n\n  {}. "]).format(words)

    def content(self, empty=0.06):
        rng = self.rng
        if rng.random() < empty:
            return rng.choice(["", "", " \n"])
        if rng.random() < self.parts_share:
            return [{"type": "text", "text": self.words()} for _ in range(rng.choice([1, 1, 2, 3]))]
        return self.words()

    def add(self, role, content, **fields):
        message = {"role": role, "content": content, **fields}
        if self.rng.random() < 0.05:
            message["name"] = "bob"
        self.messages.append(message)

    def call(self):
        rng = self.rng
        self.calls += 1
        arguments = rng.choice([
            {"city": self.words()}, {"city": self.words(), "days": 3}, {}, {"days": 2}, {"days": 1.5, "deep": {"list": [1, "x", None]}},
            {"city": "München", "mode": True}])
        return {"type": "function", "id": f"call{self.calls:05}",
                "function": {"name": rng.choice(["get_weather", "now"]), "arguments": arguments}}

    def assistant(self, calls):
        rng, fields = self.rng, {}
        if rng.random() < 0.3:
            fields[rng.choice(["reasoning_content", "reasoning_content", "reasoning", "thinking"])] = self.words()
        content = self.content()
        if calls:
            fields["tool_calls"] = [self.call() for _ in range(rng.choice([1, 1, 1, 2]))]
            content = rng.choice(["", "", None, content])
        elif rng.random() < 0.08:
            content = f"<think>\n{self.words()}\n</think>\n\n{self.words()}"
        self.add("assistant", content, **fields)
        for call in fields.get("tool_calls", []):
            self.results.append(call)

    def round(self, last):
        rng = self.rng
        self.add("user", self.content())
        if rng.random() < 0.04:
            self.add("user", self.content())
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            self.results = []
            self.assistant(True)
            if last and rng.random() < 0.15:
                return
            for call in self.results:
                fields = {"tool_call_id": call["id"]}
                if rng.random() < 0.7:
                    fields["name"] = call["function"]["name"]
                self.messages.append({"role": "tool", "content": self.content(), **fields})
            if last and rng.random() < 0.1:
                return
        if last and rng.random() < 0.15:
            return
        self.results = []
        self.assistant(False)
        if rng.random() < 0.04:
            self.assistant(False)

    def draw(self):
        rng = self.rng
        for role in rng.choice([[], [], ["system"], ["system"], ["system"], ["developer"], ["system", "system"], ["system", "developer"]]):
            self.add(role, self.content())
        if rng.random() < 0.03:
            self.results = []
            self.assistant(rng.random() < 0.3)
        rounds = rng.choice([1, 1, 2, 2, 3])
        for number in range(rounds):
            self.round(number + 1 == rounds)
        case = {"messages": self.messages, "extra": {"bos_token": "<s>", "eos_token": "</s>"}}
        if rng.random() < (0.8 if self.calls else 0.2):
            case["tools"] = TOOLS
        if rng.random() < 0.2:
            case["extra"]["enable_thinking"] = rng.random() < 0.5
        return case


def render(template, case, messages, prompt):
    has_spans = "{% generation" in template or "{%- generation" in template
    try:
        texts, spans = chat_template_utils.render_jinja_template(
            conversations=[messages], tools=case.get("tools"), chat_template=template, add_generation_prompt=prompt,
            return_assistant_tokens_mask=has_spans, **case["extra"])
        text = texts[0]
        text.encode()
    except Exception as error:  # a template can raise any exception
        return {"error": f"{type(error).__name__}: {error}"}
    byte_spans = [[len(text[:at].encode()) for at in span] for span in (spans[0] if has_spans else [])]
    return {"text": text, "spans": byte_spans}


def turns_of(template, case, full_text):
    turns = []
    for i, message in enumerate(case["messages"]):
        if message["role"] != "assistant":
            continue
        before = render(template, case, case["messages"][:i], True).get("text")
        up_to = render(template, case, case["messages"][:i + 1], False).get("text")
        is_prefix = before is not None and up_to is not None and full_text.startswith(up_to) and up_to.startswith(before)
        turns.append([len(before.encode()), len(up_to.encode())] if is_prefix else None)
    return turns


def main():
    out, seed, count, *templates = sys.argv[1:]
    result = {}
    for name, path in (t.split("=", 1) for t in templates):
        with open(path, encoding="utf-8", newline="") as file:
            template = file.read()
        rng = random.Random(f"{seed}/{name}")
        result[name] = []
        for _ in range(int(count)):
            case = ChatGenerator(rng).draw()
            for prompt in (0, 1):
                case[str(prompt)] = render(template, case, case["messages"], bool(prompt))
            if "text" in case["0"]:
                case["turns"] = turns_of(template, case, case["0"]["text"])
            result[name].append(case)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
