"""Train under torchft, PyTorch's fault-tolerant data parallelism, the counterpart of `kills_worker.py`: the same layers
in two replica groups of one worker each; prints the times of events, and worker 1 dies after the given step.

kills_torchft.py INDEX DIES START, with the lighthouse's address in TORCHFT_LIGHTHOUSE.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from process_start import find_start
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STARTED, IMPORTED = find_start(), time.time()
STEPS, TOGETHER, WIDTH, ROWS = 4000, 20, 256, 32


def main(index: str, dies: str, start: str) -> None:
    """Train; after the restart, until both workers have made some steps together."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # which the manager expects
    layers = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    inner = torch.optim.Adam(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        replica_id=f"worker_{index}",
    )  # fmt: skip
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    draw = torch.Generator().manual_seed(int(index))
    together, alone, asked = 0, False, time.time()
    while manager.current_step() < STEPS and together < TOGETHER:
        before = manager.current_step()
        x, y = (torch.randn(ROWS // 2, width, generator=draw) for width in (WIDTH, 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x), y).backward()
        optimizer.step()
        step, members = manager.current_step(), manager.num_participants()
        kind = "step" if step > before else "fails"
        times = " ".join(f"{each:.3f}" for each in (time.time(), asked, STARTED, IMPORTED))
        print(f"EVENT {kind} {index} {start} {step} {times} {members}", flush=True)
        if step >= int(dies) and index == "1" and start == "0":
            print(f"EVENT dies {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        alone = alone or start == "1" or (step > int(dies) and members == 1)
        together += alone and members == 2
        time.sleep(0.05)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
