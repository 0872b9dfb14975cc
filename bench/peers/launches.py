"""Kernels that a training step of PyTorch would launch: the peer of bench/launches_bench.cc.

    launches.py MODEL_DIR RANKS ROWS LENGTH dp|tp|sp|SCHEDULE MICRO_BATCHES

Answers each request on stdin, {"steps": N}, with {"launches": of one step of rank 0, "loss": L, "kernels": {name: count}}
after N steps, at least 4. The steps are those of tp_step.py (dp, tp, sp) and layout_step.py (pipeline schedules), on CPU
ranks under PyTorch's profiler. A launch is a collective, or an operation of ATen that calls no other one which counts and
neither only looks at a tensor nor only allocates. An operation on a list of tensors that accelerators have a kernel for is
one launch.
"""

import collections
import sys

from torch.profiler import ProfilerActivity, profile

import layout_step
import local_ranks
import tp_step

# Operations that do no work on a device: they make a tensor of other sizes over the same bytes, allocate, or ask.
NO_KERNEL = {
    "alias", "as_strided", "chunk", "clone", "contiguous", "detach", "detach_", "empty", "empty_like", "empty_strided",
    "expand", "expand_as", "flatten", "is_pinned", "is_same_size", "item", "lift_fresh", "narrow", "new_empty", "numel",
    "permute", "pin_memory", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type", "select", "set_", "set_data",
    "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as", "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "_version",
}
# Of a list of tensors, in one kernel on an accelerator.
OF_LISTS = ("_foreach_", "split_with_sizes_copy", "_chunk_cat")


def kernels_of(event, found):
    """Adds the kernels of an event and of those below it; whether there were any."""
    if event.name.startswith("c10d::"):
        found[event.name] += "barrier" not in event.name
        return True
    operation = event.name.removeprefix("aten::") if event.name.startswith("aten::") else None
    whole = operation is not None and operation.startswith(OF_LISTS)
    if not whole and any([kernels_of(child, found) for child in event.cpu_children]):  # of every child
        return True
    if operation is None or operation in NO_KERNEL:
        return False
    found[event.name] += 1
    return True


def kernels_during(work, steps):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _, loss, _ = work({"steps": steps})
    found = collections.Counter()
    for event in profiler.events():
        if event.cpu_parent is None:
            kernels_of(event, found)
    return found, loss


def make_worker(rank, ranks, model_dir, rows, length, how, micro_batches):
    if how in ("dp", "tp", "sp"):
        work = tp_step.make_worker(rank, ranks, model_dir, rows, length, how)
    else:
        work = layout_step.make_worker(rank, ranks, model_dir, rows, length, how, micro_batches)

    def count(request):
        work({"steps": request["steps"] - 3})  # the first makes the optimizer's state
        once, _ = kernels_during(work, 1)
        twice, loss = kernels_during(work, 2)
        twice.subtract(once)  # what a request costs apart from its steps is in both
        return loss, {name: number for name, number in twice.items() if number}

    return count


def joined(_, results):
    loss, kernels = results[0]
    return {"launches": sum(kernels.values()), "loss": loss, "kernels": kernels}


if __name__ == "__main__":
    model_dir, ranks, rows, length, how = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, how, int(sys.argv[6])), joined)
