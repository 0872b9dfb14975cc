"""Trains a model with Adam under PyTorch's FullyShardedDataParallel on two Gloo CPU ranks, and prints its state dicts.

    optim_state.py

Prints a JSON list with one object per rank. For use_orig_params=False ("flat") and True ("original") it has the initial
weights, and after three steps the full state dicts, this rank's chunks of the sharded state dicts, and the state dict
that optim_state_dict_to_load() returns.
"""

import json
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

warnings.simplefilter("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7) + 1)
        self.again = self.scale
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.first = nn.Linear(3, 5)
        self.frozen = nn.Linear(3, 7, bias=False)
        self.middle = nn.Linear(5, 7)
        self.last = nn.Linear(7, 1)

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x)))) + self.frozen(x)
        return self.last(hidden * self.scale) + self.again.sum() + self.empty.sum()


def listed(value):
    if torch.is_tensor(value):
        return {"shape": list(value.shape), "values": value.detach().double().flatten().tolist()}
    return value


def chunk(value):
    if not hasattr(value, "local_shards"):
        return listed(value)
    shards = value.local_shards()
    return {
        "size": list(value.size()),
        "chunks": [
            {"offsets": s.metadata.shard_offsets, "sizes": s.metadata.shard_sizes, **listed(s.tensor)} for s in shards
        ],
    }


def states(osd, convert):
    return {str(k): {n: convert(v) for n, v in s.items()} for k, s in osd["state"].items()}


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = {}
    for original in (False, True):
        torch.manual_seed(5)
        net = Net()
        net.frozen.requires_grad_(False)
        if original:  # a unit with frozen and trainable parameters
            net.middle.bias.requires_grad_(False)
            net.empty.requires_grad_(False)
        start = {n: listed(p) for n, p in net.named_parameters()}
        options = dict(device_id=torch.device("cpu"), use_orig_params=original)
        net.first = FSDP(net.first, **options)
        net.frozen = FSDP(net.frozen, **options)
        net = FSDP(net, **options)
        optimizer = torch.optim.Adam([p for p in net.parameters()], lr=0.05)
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 12).view(4, 3)
            (net(x) - 0.3 * step).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Not with offload_to_cpu, the default: on the CPU all states of a unit would share one buffer, which has the
        # values of the last state.
        optim_config = FullOptimStateDictConfig(offload_to_cpu=False)
        with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), optim_config):
            full = FSDP.optim_state_dict(net, optimizer)
            loaded = FSDP.optim_state_dict_to_load(net, optimizer, full)
        weights = {n: listed(v) for n, v in net.state_dict().items()}
        with FSDP.state_dict_type(
            net, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ):
            sharded = FSDP.optim_state_dict(net, optimizer)
            again = FSDP.optim_state_dict_to_load(net, optimizer, sharded)
            weight_chunks = {n: chunk(v) for n, v in net.state_dict().items()}
        with FSDP.state_dict_type(net, StateDictType.LOCAL_STATE_DICT):
            local = {n: chunk(v) for n, v in net.state_dict().items()}
        assert states(again, listed) == states(loaded, listed)
        result["original" if original else "flat"] = {
            "start": start,
            "full": states(full, listed),
            "groups": [g["params"] for g in full["param_groups"]],
            "sharded": states(sharded, chunk),
            "loaded": states(loaded, listed),
            "loaded_groups": [g["params"] for g in loaded["param_groups"]],
            "weights": weights,
            "weight_chunks": weight_chunks,
            "local": local,
        }
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=2)
        print(json.dumps([json.load(open(os.path.join(folder, f"{rank}.json"))) for rank in range(2)]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
