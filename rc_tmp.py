import sys, torch, test_moe as t
from test_moe import *
def body(rank, ranks):
    import torch._logging
    if rank == 0: torch._logging.set_logs(recompiles=True)
    config = exact_config(sequence_parallel=True, init_std=0.5, **INDUCTOR_OVER_RANKS["overlap"])
    layer = MoELayer(config, ProcessGroups.from_mesh(mesh_of(ep=2)))
    function = compiled(layer, "inductor", dynamic=True)
    for Ts in ([20, 27], [33, 24]):
        agree(function, layer, leaf(Ts[rank], 6))
if __name__ == "__main__":
    t.spawn_gloo(body, 2)
