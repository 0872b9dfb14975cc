"""Counts the kernels that a training step of PyTorch would launch on an accelerator: the peer of
bench/launches_bench.cc.

    launches.py MODEL_DIR RANKS ROWS LENGTH dp|tp|sp|SCHEDULE MICRO_BATCHES

Answers each request {"steps": N}, N >= 4, on stdin with {"launches": COUNT, "loss": L, "kernels": {name: count}}: the
launches of one step of rank 0, after N steps. The steps are those of tp_step.py (dp, tp, sp) and layout_step.py
(pipeline schedules). They run on CPU ranks under PyTorch's profiler. These count as one launch:

- a collective, except a barrier
- an ATen operation without a counted operation inside, unless it only makes a view, allocates, or reads metadata
- an operation on a list of tensors, if accelerators have one kernel for the list (_foreach_add_)
"""

import collections
import sys

from torch.profiler import ProfilerActivity, profile

import layout_step
import local_ranks
import tp_step

# Operations that launch no kernel: they make a view, allocate memory, or read metadata.
NO_KERNEL = {
    "alias", "as_strided", "chunk", "clone", "contiguous", "detach", "detach_", "empty", "empty_like", "empty_strided",
    "expand", "expand_as", "flatten", "is_pinned", "is_same_size", "item", "lift_fresh", "narrow", "new_empty", "numel",
    "permute", "pin_memory", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type", "select", "set_", "set_data",
    "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as", "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "_version",
}
# Prefixes of operations on a list of tensors that run as one kernel on an accelerator.
LIST_KERNELS = ("_foreach_", "split_with_sizes_copy", "_chunk_cat")


def count_kernels(event, found):
    """Adds the kernels of an event and of its children to `found`. Returns whether it found any."""
    if event.name.startswith("c10d::"):
        found[event.name] += "barrier" not in event.name
        return True
    operation = event.name.removeprefix("aten::") if event.name.startswith("aten::") else None
    one_kernel = operation is not None and operation.startswith(LIST_KERNELS)
    # any() gets a list, not a generator, so that every child is visited.
    if not one_kernel and any([count_kernels(child, found) for child in event.cpu_children]):
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
            count_kernels(event, found)
    return found, loss


def make_worker(rank, ranks, model_dir, rows, length, layout, micro_batches):
    if layout in ("dp", "tp", "sp"):
        work = tp_step.make_worker(rank, ranks, model_dir, rows, length, layout)
    else:
        work = layout_step.make_worker(rank, ranks, model_dir, rows, length, layout, micro_batches)

    def count(request):
        work({"steps": request["steps"] - 3})  # the first step creates the optimizer's state
        once, _ = kernels_during(work, 1)
        twice, loss = kernels_during(work, 2)
        twice.subtract(once)  # leaves one step: both include the launches of a request outside its steps
        return loss, {name: number for name, number in twice.items() if number}

    return count


def join_results(_, results):
    loss, kernels = results[0]
    return {"launches": sum(kernels.values()), "loss": loss, "kernels": kernels}


if __name__ == "__main__":
    model_dir, ranks, rows, length, layout = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, layout, int(sys.argv[6])), join_results)
