"""Writes Parquet files into a folder: parquet_oracle.py FOLDER. For each FILE it also writes FILE.jsonl, the rows that
pyarrow reads from FILE as JSON lines."""
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

folder = Path(sys.argv[1])


def read_as_json(path):
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value

    table = pq.read_table(path)
    rows = []
    for row in table.to_pylist(maps_as_pydicts="strict"):
        rows.append(plain(row))
    return rows


def write(name, table, **options):
    path = folder / name
    pq.write_table(table, path, **options)
    with open(folder / (name + ".jsonl"), "w") as out:
        for row in read_as_json(path):
            out.write(json.dumps(row) + "\n")


message = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.large_string()),
        ("tool_calls", pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))),
    ]
)
chats = [
    {
        "messages": [
            {"role": "user", "content": f"Question {i} é\u20ac"},
            {"role": "assistant", "content": None if i % 5 == 0 else f"Answer {i}",
             "tool_calls": [{"name": "f", "arguments": "{\"x\": %d}" % i}] if i % 3 == 0 else None},
        ]
        * (i % 4),
        "source": ["web", "book", None][i % 3],
        "score": i / 7 if i % 2 else None,
    }
    for i in range(1000)
]
schema = pa.schema(
    [("messages", pa.list_(message)), ("source", pa.dictionary(pa.int32(), pa.string())), ("score", pa.float64())]
)
nested = pa.Table.from_pylist(chats, schema=schema)
codecs = ["none"] + [codec for codec in ["snappy", "gzip", "brotli", "zstd", "lz4"] if pa.Codec.is_available(codec)]
for codec in codecs:
    write(f"nested_{codec}.parquet", nested, compression=codec, row_group_size=300)
write("pages.parquet", nested, data_page_version="2.0", data_page_size=512, use_dictionary=False)

count = 50
write(
    "types.parquet",
    pa.table(
        {
            "i8": pa.array(range(-25, 25), pa.int8()),
            "u16": pa.array(range(count), pa.uint16()),
            "i32": pa.array([None if i % 4 == 0 else i for i in range(count)], pa.int32()),
            "i64": pa.array([2**62 + i for i in range(count)], pa.int64()),
            "u64": pa.array([2**63 + i for i in range(count)], pa.uint64()),
            "f32": pa.array([i / 4 for i in range(count)], pa.float32()),
            "yes": pa.array([i % 2 == 0 for i in range(count)]),
            "nothing": pa.nulls(count),
            "large": pa.array([[f"{i}"] * (i % 3) for i in range(count)], pa.large_list(pa.large_string())),
            "fixed": pa.array([[i, i + 1] for i in range(count)], pa.list_(pa.int64(), 2)),
            "map": pa.array([[(f"k{j}", j) for j in range(i % 3)] for i in range(count)],
                            pa.map_(pa.string(), pa.int64())),
            "deep": pa.array([{"a": {"b": [[i], []]}} for i in range(count)]),
        }
    ),
)
write("empty.parquet", nested.slice(0, 0))
# Records in the formats of common data sets. The test compares them with the same records as JSON lines.
sets = {
    "messages": [{"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]}
                 for i in range(20)],
    "sharegpt": [{"conversations": [{"from": "human", "value": f"Q{i}"}, {"from": "gpt", "value": f"A{i}"}]}
                 for i in range(20)],
    "alpaca": [{"instruction": f"Q{i}", "input": "", "output": f"A{i}"} for i in range(20)],
}
for name, rows in sets.items():
    write(f"set_{name}.parquet", pa.Table.from_pylist(rows))
print(json.dumps({"codecs": codecs, "version": pa.__version__}))
