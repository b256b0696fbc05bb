"""All torch names that the launcher needs and that torch does not guarantee, checked at import.

Missing names are reported before any process is started. Tested versions: docs/compatibility.md.
"""

import importlib

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException, Std, to_map
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from swift_ft.errors import ServiceError

AGENT_LOGGER = "torch.distributed.elastic.agent.server.api"

_NEEDED = {
    "torch.distributed.run": ["get_args_parser", "config_from_args", "parse_min_max_nnodes"],
    "torch.distributed.launcher.api": ["LaunchConfig"],
    AGENT_LOGGER: [
        "RunResult",
        "SimpleElasticAgent",
        "Worker",
        "WorkerGroup",
        "WorkerSpec",
        "WorkerState",
    ],
    f"{AGENT_LOGGER}:SimpleElasticAgent": [
        "run",
        "_rendezvous",
        "_assign_worker_ranks",
        "_invoke_run",
    ],
    "torch.distributed.elastic.multiprocessing.api": ["SignalException", "Std", "to_map"],
    "torch.distributed.elastic.rendezvous": [
        "RendezvousHandler",
        "RendezvousInfo",
        "RendezvousStoreInfo",
    ],
    "torch.distributed.elastic.rendezvous.utils": ["parse_rendezvous_endpoint"],
    "torch.distributed.elastic.utils.api": ["macros"],
}


def missing_names() -> list[str]:
    """Returns the needed names that this torch does not have, dotted."""
    missing = []
    for where, names in _NEEDED.items():
        module_name, _, attribute = where.partition(":")
        try:
            holder: object = importlib.import_module(module_name)
        except ModuleNotFoundError:
            missing.append(module_name)
            continue
        if attribute:
            holder = getattr(holder, attribute, None)
        missing += [f"{where.replace(':', '.')}.{name}" for name in names if not hasattr(holder, name)]
    return missing


_missing = missing_names()
if _missing:
    raise ServiceError(
        f"torch {torch.__version__} lacks {', '.join(_missing)}: install a version of docs/compatibility.md, such as "
        "2.13"
    )


__all__ = [
    "AGENT_LOGGER",
    "LaunchConfig",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousStoreInfo",
    "RunResult",
    "SignalException",
    "SimpleElasticAgent",
    "Std",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "config_from_args",
    "get_args_parser",
    "macros",
    "missing_names",
    "parse_min_max_nnodes",
    "parse_rendezvous_endpoint",
    "to_map",
]
