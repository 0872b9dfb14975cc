"""Runs local Gloo ranks that answer requests. The peers with several ranks use this module."""

import json
import multiprocessing
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist


def _rank_main(make_worker, arguments, rank, ranks, store, requests, answers):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    work = make_worker(rank, ranks, *arguments)
    while (request := requests.get()) is not None:
        answers.put((rank, work(request)))
    dist.destroy_process_group()


def serve(ranks, make_worker, arguments, join_results):
    """Answers each JSON line on stdin with one JSON line, until stdin ends.

    Starts `ranks` processes with one thread each and a default process group. Each calls
    work = make_worker(rank, ranks, *arguments) once, and work(request) for each request. The answer is
    join_results(request, [result of each rank]). make_worker must be a function of a module, because it is pickled."""
    context = multiprocessing.get_context("spawn")
    requests, answers = [context.Queue() for _ in range(ranks)], context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank_main, daemon=True,
                                     args=(make_worker, arguments, rank, ranks, folder + "/store", requests[rank], answers))
                     for rank in range(ranks)]
        for process in processes:
            process.start()
        for request in map(json.loads, sys.stdin):
            for queue in requests:
                queue.put(request)
            results = dict(answers.get() for _ in range(ranks))
            print(json.dumps(join_results(request, [results[rank] for rank in range(ranks)])), flush=True)
        for queue in requests:
            queue.put(None)
        for process in processes:
            process.join(10)
