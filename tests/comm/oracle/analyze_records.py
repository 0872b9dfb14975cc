"""Runs PyTorch's flight-recorder analyzer (fr_trace) on a folder of flight records.

    analyze_records.py FOLDER

Prints the analyzer's log on stderr, and the groups, collectives and number of calls that it found as JSON on stdout.
"""

import json
import logging
import pickle
import sys
import tempfile

from torch.distributed.flight_recorder import fr_trace

with tempfile.NamedTemporaryFile() as table:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    fr_trace.main([sys.argv[1], "--allow-incomplete-ranks", "-o", table.name])
    with open(table.name, "rb") as file:
        _, db = pickle.load(file)

print(
    json.dumps(
        {
            "groups": [{"desc": group.desc, "size": group.size} for group in db.groups],
            "collectives": [
                {
                    "name": one.collective_name,
                    "sequence": one.collective_seq_id,
                    "passes": one.pass_check,
                    "missing": sorted(one.missing_ranks or []),
                    "mismatch": {
                        rank: str(other.type_of_mismatch) for rank, other in (one.mismatch_collectives or {}).items()
                    },
                }
                for one in db.collectives
            ],
            "calls": len(db.ncclcalls),
        }
    )
)
