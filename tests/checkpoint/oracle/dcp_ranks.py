"""PyTorch's side of checkpoints that both read: dcp_ranks.py VERB RANKS ARGUMENTS, on gloo ranks of this machine.

write DIR KIND...     trains a small model a step under each KIND (fsdp2, fsdp1, fsdp1_mesh, tp, fsdp_tp, hsdp), saves it with
                      AdamW's state as DIR/KIND, and every tensor whole as DIR/KIND.safetensors; fsdp2 also without
                      collectives as fsdp2_alone, the model as safetensors shards in fsdp2_shards and with torch.save
read WHOLE FOLDER...  loads every tensor of WHOLE.safetensors from each FOLDER, sharded over the ranks on dim 0 and on the
                      last dim, replicated, and plain, and compares bitwise
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


def parallelized(kind, model, ranks):
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
        more = {"device_mesh": mesh} if kind == "fsdp1_mesh" else {}
        cpu = torch.device("cpu")
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, device_id=cpu, use_orig_params=True, **more)
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True, **more)
    dp = mesh["dp"] if kind == "fsdp_tp" else mesh
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    return fully_shard(model, mesh=dp)


def flattened(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def whole(value):
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
    model = parallelized(kind, Model(), ranks)
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
    tensors = {name: whole(value) for name, value in flattened(state)
               if isinstance(value, torch.Tensor) or hasattr(value, "local_shards")}
    if dist.get_rank() == 0:
        save_file(tensors, folder + ".safetensors")
        model_tensors = {name.removeprefix("model."): value for name, value in tensors.items() if name[:6] == "model."}
        torch.save({"epoch": 3, "model": model_tensors, "lists": [(torch.ones(2), 5)]}, folder + ".pt")


def read(ranks, whole_path, *folders):
    wanted = load_file(whole_path + ".safetensors")
    mesh = init_device_mesh("cpu", (ranks,))
    for folder in folders:
        read_folder(mesh, folder, wanted)
        if dist.get_rank() == 0:
            print(len(wanted), "tensors equal")


def read_folder(mesh, folder, wanted):
    for how in ([Shard(0)], [Shard(-1)], [Replicate()], None):
        def laid(value):
            if how is None:
                return value
            return distribute_tensor(value, mesh, how if value.ndim > 0 else [Replicate()], src_data_rank=None)

        state = {name: laid(torch.zeros_like(value)) for name, value in wanted.items()}
        dcp.load(state, checkpoint_id=folder)
        for name, value in wanted.items():
            assert state[name].dtype == value.dtype and state[name].shape == value.shape, name
            assert torch.equal(local_bytes(state[name]), local_bytes(laid(value))), (name, how)


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
