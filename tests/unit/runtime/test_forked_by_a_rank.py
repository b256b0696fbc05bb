"""What a trainer forks after a failure: workers of its data loader."""

import subprocess
import sys

# An ended generation's group, which waits for the collector in a cycle of errors and frames.
SCRIPT = """
import gc, os, signal
import torch.distributed as dist
import swift_ft.comm.gloo

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gc.disable()
held = [dist.distributed_c10d._get_default_group()]
held.append(held)
dist.destroy_process_group()
del held
child = os.fork()
if child == 0:
    signal.alarm(10)
    gc.collect()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_collector_of_a_child_ends_no_group_of_its_parent() -> None:
    """The threads that it waits for are not there: the worker hung, or met with a segmentation fault."""
    assert subprocess.run([sys.executable, "-c", SCRIPT], check=False, timeout=60).returncode == 0
