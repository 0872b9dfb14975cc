"""Writes and reads distributed checkpoints with PyTorch on local Gloo ranks.

    dcp_ranks.py write RANKS DIR KIND...
    dcp_ranks.py read RANKS FULL FOLDER...

write: for each KIND (fsdp2, fsdp1, fsdp1_mesh, tp, fsdp_tp, hsdp) trains a small model for one step. It saves the model
with AdamW's state as the distributed checkpoint DIR/KIND, every full tensor in DIR/KIND.safetensors, and the model with
torch.save in DIR/KIND.pt. For fsdp2 it also saves the checkpoint without collectives in DIR/fsdp2_alone, and the model
as sharded safetensors files in DIR/fsdp2_shards.

read: loads every tensor of FULL.safetensors from the checkpoint in each FOLDER and compares it bitwise. The targets are
sharded over the ranks on dim 0, sharded on the last dim, replicated, and plain tensors.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 12)
        self.down = torch.nn.Linear(12, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(5, 6)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(6, 7)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.float()


def parallelize(kind, model, ranks):
    if kind in ("tp", "fsdp_tp"):
        shape = (1, ranks) if kind == "tp" else (ranks // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind == "tp":
            return model
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "dp"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    if kind.startswith("fsdp1"):
        mesh_options = {"device_mesh": mesh} if kind == "fsdp1_mesh" else {}
        cpu = torch.device("cpu")
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, device_id=cpu, use_orig_params=True, **mesh_options)
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True, **mesh_options)
    dp = mesh["dp"] if kind == "fsdp_tp" else mesh
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    return fully_shard(model, mesh=dp)


def flatten(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def full_tensor(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    elif hasattr(value, "local_shards"):
        out = torch.empty(value.size()) if dist.get_rank() == 0 else None
        value.gather(0, out)
        value = out
    return None if value is None else value.detach().clone().contiguous()


def write(ranks, folder, *kinds):
    for kind in kinds:
        write_kind(ranks, kind, f"{folder}/{kind}")


def write_kind(ranks, kind, folder):
    torch.manual_seed(3)
    model = parallelize(kind, Model(), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95))
    torch.manual_seed(4)
    model(torch.randn(4, 5)).pow(2).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    state = {"model": model_state, "optim": optimizer_state}
    dcp.save(state, checkpoint_id=folder)
    if kind == "fsdp2":  # other ways to save the same state
        dcp.save(state, checkpoint_id=folder + "_alone", use_collectives=False)
        dcp.save(model_state, storage_writer=HuggingFaceStorageWriter(folder + "_shards", save_distributed=True))
    tensors = {name: full_tensor(value) for name, value in flatten(state)
               if isinstance(value, torch.Tensor) or hasattr(value, "local_shards")}
    if dist.get_rank() == 0:
        save_file(tensors, folder + ".safetensors")
        model_tensors = {name.removeprefix("model."): value for name, value in tensors.items() if name[:6] == "model."}
        torch.save({"epoch": 3, "model": model_tensors, "lists": [(torch.ones(2), 5)]}, folder + ".pt")


def read(ranks, full_path, *folders):
    expected = load_file(full_path + ".safetensors")
    mesh = init_device_mesh("cpu", (ranks,))
    for folder in folders:
        read_folder(mesh, folder, expected)
        if dist.get_rank() == 0:
            print(len(expected), "tensors equal")


def read_folder(mesh, folder, expected):
    for placements in ([Shard(0)], [Shard(-1)], [Replicate()], None):
        def distributed(value):
            if placements is None:
                return value
            return distribute_tensor(value, mesh, placements if value.ndim > 0 else [Replicate()], src_data_rank=None)

        state = {name: distributed(torch.zeros_like(value)) for name, value in expected.items()}
        dcp.load(state, checkpoint_id=folder)
        for name, value in expected.items():
            assert state[name].dtype == value.dtype and state[name].shape == value.shape, name
            assert torch.equal(local_bytes(state[name]), local_bytes(distributed(value))), (name, placements)


def local_bytes(value):
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.contiguous().reshape(-1).view(torch.uint8)


def rank_main(rank, ranks, store, verb, arguments):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    {"read": read, "write": write}[verb](ranks, *arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    verb, ranks = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, args=(ranks, folder + "/store", verb, sys.argv[3:]), nprocs=ranks)
