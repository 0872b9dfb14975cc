"""Makes JSON schemas and validates JSON texts with pydantic, for json_schema_oracle_test.cc.

  schema_oracle.py draw SEED COUNT       prints COUNT random models: [{"schema", "instances": [TEXT]}]
  schema_oracle.py check SEED COUNT      reads [[TEXT]], a list of texts for each of the same models, and prints the
                                         texts that the model refuses: [[MODEL_INDEX, TEXT, ERROR]]
"""
import datetime
import enum
import json
import random
import sys
import typing
import uuid

import pydantic


def random_string(draw, minimum, maximum):
    return "".join(draw.choice("ab Z09_\"\\/\n\t\u00e9\u20ac\U0001f600{}[]:,") for _ in range(draw.randint(minimum, maximum)))


class TypeGenerator:
    """Makes random types, each with a function that returns a random value of the type."""

    def __init__(self, draw):
        self.draw, self.names = draw, 0

    def name(self):
        self.names += 1
        return f"M{self.names}"

    def type(self, depth):
        kinds = ["int", "bounded", "float", "bool", "string", "literal", "enum", "date", "time", "datetime", "uuid", "none",
                 "null_literal", "big_literal"]
        if depth > 0:
            kinds += ["list", "list", "tuple", "dict", "optional", "union", "model", "model", "tree"]
        return getattr(self, "a_" + self.draw.choice(kinds))(depth)

    def a_int(self, depth):
        return int, lambda: self.draw.randint(-10 ** self.draw.randint(0, 17), 10 ** self.draw.randint(0, 17))

    def a_bounded(self, depth):
        minimum = self.draw.randint(-300, 300)
        maximum = minimum + self.draw.choice([0, 1, 7, 90, 1000])
        field = pydantic.Field(ge=minimum, le=maximum) if self.draw.random() < 0.5 else pydantic.Field(gt=minimum - 1, lt=maximum + 1)
        return typing.Annotated[int, field], lambda: self.draw.randint(minimum, maximum)

    def a_float(self, depth):
        if self.draw.random() < 0.5:
            minimum = self.draw.randint(-20, 20)
            maximum = minimum + self.draw.choice([1, 2, 30])
            inclusive = self.draw.random() < 0.5
            field = pydantic.Field(ge=minimum, le=maximum) if inclusive else pydantic.Field(gt=minimum, lt=maximum)
            inside = [minimum + 0.5, minimum + 0.125] + ([minimum, maximum] if inclusive else [])
            return typing.Annotated[float, field], lambda: self.draw.choice(inside)
        return float, lambda: self.draw.choice([0.5, -3.0, 2, 1.25e-7, 6e20])

    def a_bool(self, depth):
        return bool, lambda: self.draw.random() < 0.5

    def a_none(self, depth):
        return None, lambda: None

    def a_string(self, depth):
        if self.draw.random() < 0.5:
            return str, lambda: random_string(self.draw, 0, 12)
        minimum = self.draw.randint(0, 3)
        maximum = minimum + self.draw.randint(0, 4)
        return typing.Annotated[str, pydantic.Field(min_length=minimum, max_length=maximum)], lambda: random_string(self.draw, minimum, maximum)

    def a_literal(self, depth):
        values = tuple(dict.fromkeys([self.draw.choice(["x", "y\"z", "\u00e9", 3, -4]) for _ in range(3)]))
        return typing.Literal[values], lambda: self.draw.choice(values)

    def a_null_literal(self, depth):
        values = self.draw.choice([(None,), (None, "x"), (3, None)])
        return typing.Literal[values], lambda: self.draw.choice(values)

    def a_big_literal(self, depth):
        values = self.draw.choice([(10 ** 22 + 1,), (-98765432109876543210, 10 ** 25)])
        return typing.Literal[values], lambda: self.draw.choice(values)

    def a_enum(self, depth):
        kind = enum.Enum(self.name(), {"A": "first", "B": "se cond", "C": "3"})
        return kind, lambda: self.draw.choice(list(kind)).value

    def a_date(self, depth):
        return datetime.date, lambda: datetime.date.fromordinal(self.draw.randint(367, 3_000_000)).isoformat()

    def a_time(self, depth):
        return datetime.time, lambda: f"{self.draw.randint(0, 23):02}:{self.draw.randint(0, 59):02}:{self.draw.randint(0, 59):02}Z"

    def a_datetime(self, depth):
        day, time = self.a_date(depth)[1], self.a_time(depth)[1]
        return datetime.datetime, lambda: f"{day()}T{time()}"

    def a_uuid(self, depth):
        return uuid.UUID, lambda: str(uuid.UUID(int=self.draw.getrandbits(128)))

    def a_list(self, depth):
        kind, value = self.type(depth - 1)
        if self.draw.random() < 0.5:
            return list[kind], lambda: [value() for _ in range(self.draw.randint(0, 3))]
        minimum = self.draw.randint(0, 2)
        maximum = minimum + self.draw.randint(0, 2)
        return typing.Annotated[list[kind], pydantic.Field(min_length=minimum, max_length=maximum)], lambda: [
            value() for _ in range(self.draw.randint(minimum, maximum))]

    def a_tuple(self, depth):
        parts = [self.type(depth - 1) for _ in range(self.draw.randint(1, 3))]
        return tuple[tuple(kind for kind, _ in parts)], lambda: [value() for _, value in parts]

    def a_dict(self, depth):
        kind, value = self.type(depth - 1)
        return dict[str, kind], lambda: {random_string(self.draw, 0, 4): value() for _ in range(self.draw.randint(0, 3))}

    def a_optional(self, depth):
        kind, value = self.type(depth - 1)
        return typing.Optional[kind], lambda: None if self.draw.random() < 0.4 else value()

    def a_union(self, depth):
        (left, one), (right, other) = self.type(depth - 1), self.type(depth - 1)
        return typing.Union[left, right], lambda: one() if self.draw.random() < 0.5 else other()

    def a_model(self, depth):
        fields, values = {}, []
        for name in self.draw.sample(["id", "na me", "\u00e9", "q\"", "list", "sub", "x"], self.draw.randint(0, 4)):
            kind, value = self.type(depth - 1)
            required = self.draw.random() < 0.6
            key = f"f{len(fields)}"
            fields[key] = (kind, pydantic.Field(... if required else None, alias=name))
            values.append((name, required, value))
        extra = self.draw.choice(["forbid", "ignore"])
        model = pydantic.create_model(self.name(), __config__=pydantic.ConfigDict(extra=extra), **fields)

        def instance():
            return {name: value() for name, required, value in values if required or self.draw.random() < 0.5}

        return model, instance

    def a_tree(self, depth):
        name = self.name()
        space = {}
        exec(f"class {name}(pydantic.BaseModel):\n  value: int\n  children: list['{name}'] = []\n  next: 'typing.Optional[{name}]' = None\n",
             {"pydantic": pydantic, "typing": typing, "__name__": name}, space)
        model = space[name]
        model.model_rebuild(_types_namespace={name: model, "typing": typing})

        def instance(left=3):
            tree = {"value": self.draw.randint(0, 99)}
            if left and self.draw.random() < 0.7:
                tree["children"] = [instance(left - 1) for _ in range(self.draw.randint(0, 2))]
            return tree

        return model, instance


def models(seed, count):
    for number in range(count):
        generator = TypeGenerator(random.Random(f"{seed} {number}"))
        kind, value = generator.a_model(3)
        yield pydantic.TypeAdapter(kind), value


def close_tuples(draw, schema):
    """Rewrites some tuples as other schema generators write them: "items": false instead of, or in addition to,
    maxItems."""
    if isinstance(schema, list):
        return [close_tuples(draw, each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: close_tuples(draw, each) for key, each in schema.items()}
    if isinstance(schema.get("prefixItems"), list) and draw.random() < 0.5:
        schema["items"] = False
        if draw.random() < 0.5:
            schema.pop("maxItems", None)
    return schema


def dump_json(draw, value):
    form = draw.choice([{"separators": (",", ":")}, {"separators": (", ", ": ")}, {"indent": 2}])
    return json.dumps(value, ensure_ascii=False, **form)


def draw_models(seed, count):
    draw = random.Random(seed)
    out = []
    for adapter, value in models(seed, count):
        texts = []
        for _ in range(8):
            text = dump_json(draw, value())
            adapter.validate_json(text)  # detects errors of this script
            texts.append(text)
        out.append({"schema": close_tuples(draw, adapter.json_schema()), "instances": texts})
    json.dump(out, sys.stdout)


def check_texts(seed, count):
    wrong = []
    for number, ((adapter, _), texts) in enumerate(zip(models(seed, count), json.load(sys.stdin), strict=True)):
        for text in texts:
            try:
                adapter.validate_json(text)
            except pydantic.ValidationError as error:
                wrong.append([number, text, str(error)[:400]])
    json.dump(wrong, sys.stdout)


{"draw": draw_models, "check": check_texts}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
