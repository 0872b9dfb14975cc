"""Prints the action tables of torch.distributed.pipelining's schedules as a JSON list of cases.

A case is {"name": SCHEDULE, "ranks": P, "stages_per_rank": L, "micro_batches": N, "table": [LINE], "lowered": [LINE],
"merged": [LINE]}. Each table has a line of CSV per rank. "table" has the computations, "lowered" the table with
communication actions, and "merged" the table with adjacent backward actions merged. Large tables have no "lowered" and
"merged", because they take long to compute. If PyTorch refuses the case, it has "error": MESSAGE instead of tables.
"""

import copy
import json

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase


class Stage(_PipelineStageBase):
    """The part of a stage that a schedule reads when it makes its table."""

    def __init__(self, index, count, rank, ranks):
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, count, rank, ranks
        self.has_backward = True
        self.submod = None
        self.stage_index_to_group_rank = {}

    def _prepare_forward_infra(self, *args, **kwargs): ...

    def _prepare_backward_infra(self, *args, **kwargs): ...

    def _create_grad_recv_info(self, *args, **kwargs): ...


# The cases of PyTorch's test_pipeline_order, and further cases: (stages per rank, micro-batches, ranks).
FLEX = [
    (2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8), (4, 16, 4), (4, 32, 4),
    (4, 64, 4), (4, 16, 16), (4, 32, 32), (4, 128, 64), (3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5),
    (2, 3, 4), (2, 10, 4), (2, 15, 4),
]
V = [(2, n, p) for p in (1, 2, 3, 4, 8) for n in (1, 2, 3, 4, 6, 7, 8, 15, 16, 20)]
MULTI = {
    "Interleaved1F1B": FLEX + [(1, 4, 2), (2, 5, 2), (2, 7, 3)],
    "LoopedBFS": FLEX,
    "InterleavedZeroBubble": FLEX + [(1, 4, 2), (2, 5, 2)],
    "ZBVZeroBubble": V + [(3, 4, 2)],
    "DualPipeV": V + [(3, 8, 2)],
}
SINGLE = {"GPipe": [(1, n, p) for n, p in ((1, 1), (4, 2), (3, 4), (8, 4))],
          "1F1B": [(1, n, p) for n, p in ((1, 1), (2, 2), (4, 2), (4, 4), (9, 4), (8, 3), (1, 2))]}


LARGE = 600  # number of forward actions above which a table is not lowered


def texts(rows):
    return [",".join(str(action) if action is not None else "" for action in rows[rank]) for rank in sorted(rows)]


lower = schedules._PipelineScheduleRuntime._prepare_schedule_with_comms


def lower_small(schedule, actions, *args, **kwargs):
    if schedule._num_stages * schedule._n_microbatches <= LARGE:
        lower(schedule, actions, *args, **kwargs)


schedules._PipelineScheduleRuntime._prepare_schedule_with_comms = lower_small


def case(name, local, n, ranks):
    out = {"name": name, "ranks": ranks, "stages_per_rank": local, "micro_batches": n}
    schedule_class = schedules.get_schedule_class(name)
    stages = [Stage(i * ranks, local * ranks, 0, ranks) for i in range(local)]
    try:
        schedule = schedule_class(stages[0] if local == 1 and name in SINGLE else stages, n, loss_fn=lambda *_: None)
    except ValueError as error:
        return out | {"error": str(error)}
    if name in SINGLE:
        return out | {"table": texts(schedule._get_pipeline_order())}
    out["table"] = texts(schedule.pipeline_order)
    if local * ranks * n > LARGE:
        return out
    merged = {rank: schedules._merge_bw(copy.deepcopy(schedule.pipeline_order[rank])) for rank in schedule.pipeline_order}
    return out | {"lowered": texts(schedule.pipeline_order_with_comms), "merged": texts(merged)}


def main():
    cases = [case(name, *size) for sizes in (MULTI, SINGLE) for name in sizes for size in sizes[name]]
    print(json.dumps(cases))


main()
