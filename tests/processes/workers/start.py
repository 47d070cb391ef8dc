"""Worker: reports how its process was started, waits for the file `go`, and exits with code 3."""

import os
import sys

if "changes" in sys.argv:
    os.environ["OMP_NUM_THREADS"] = "1"

import random
import signal
import threading
import time

import keras
import numpy as np

from tests.processes.worker_reports import report_value
from whale_nebula.launch.attach import VARIABLE, attach
from whale_nebula.launch.worker_exit import exit_agreement


def list_descriptors() -> list[str]:
    """The kinds of open files, and whether child processes inherit them."""
    kinds = []
    for number in map(int, os.listdir("/proc/self/fd")):
        if os.path.exists(f"/proc/self/fd/{number}"):
            kinds.append(f"{os.readlink(f'/proc/self/fd/{number}').partition(':')[0]} {os.get_inheritable(number)}")
    return sorted(kinds)


def main(go: str) -> None:
    me = attach()
    report_value("identity", [me.worker, me.epoch, me.seed])
    report_value("arguments", [*sys.argv, *sys.path, __name__, __file__, os.getcwd()])
    report_value("environment", {name: value for name, value in os.environ.items() if name != VARIABLE})
    report_value("descriptors", list_descriptors())
    report_value("ids", [os.getpgrp() == os.getpid(), os.getsid(0), os.getppid(), os.getpriority(os.PRIO_PROCESS, 0)])
    report_value("handlers", [str(signal.getsignal(each)).split(" at ")[0] for each in signal.valid_signals()])
    report_value("threads", sorted(each.name for each in threading.enumerate()))
    report_value("random", [random.random(), np.random.rand(), float(keras.random.uniform(()))])
    exit_agreement.begin_step()
    exit_agreement.begin_step()  # the first one is over
    while not os.path.exists(go):
        time.sleep(0.05)
    sys.exit(3)


main(sys.argv[1])
