"""A step on a device mesh that cannot disagree with the placement; start it with examples/mesh.sh.

Each rank adds up its coordinate in every group of the mesh; a real program would hand the mesh to its parallel model.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slurmdl import planned_mesh

dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of `slurmdl srun`
planned = planned_mesh()  # sizes and names of --dl-mesh
mesh = init_device_mesh("cpu", planned.sizes, mesh_dim_names=planned.names)
assert dict(zip(planned.names, mesh.get_coordinate(), strict=True)) == planned.coordinates(dist.get_rank())

sums = {}
for name in planned.names:
    value = torch.tensor(float(mesh.get_local_rank(name)))
    dist.all_reduce(value, group=mesh.get_group(name))
    sums[name] = value.item()
place = os.environ.get("SLURMD_NODENAME", "this host")
print(f"rank {dist.get_rank()} on {place}: {planned.coordinates(dist.get_rank())}, sums {sums}", flush=True)
dist.barrier()
dist.destroy_process_group()
