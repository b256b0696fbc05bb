"""Differences between the torch versions that swift supports (docs/compatibility.md), and torch's private names.

Each function checks for a feature, never for a version: a later torch either works, or is refused at import with the
names that it lacks.
"""

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import overrides
from torch._C import _distributed_c10d as _backends
from torch._C import _functorch
from torch.distributed import _mesh_layout
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _utils, schedules
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.pipelining import stage as _stage
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as _optimizer
from torch.utils import _python_dispatch
from torch.utils.data import DataLoader, dataloader

from swift_ft.device import device_types
from swift_ft.errors import ServiceError, UsageError

if TYPE_CHECKING:
    from swift_ft.comm.backend import Backend


_SETTLING = ("_initialize_pipeline_distributed_state", "_warmup_p2p")
SETTLE = next((name for name in _SETTLING if hasattr(schedules._PipelineSchedule, name)), _SETTLING[0])
"""Method of a schedule in which its stages exchange how they learn shapes: the first name from 2.15 on, the second
before."""

RESETS_SHARDED = hasattr(FSDPModule, "reset_iter_state")
"""True if FSDP2 modules can be reset in the middle of a step: from 2.13 on. Without it `session.mesh` is refused."""

GATHERED = ("unshard_ops", "unsharded_stages", "_deferred_stages", "_finalized_stages")
"""Attributes in which a looped schedule records its gathered stages (FSDP2). The last two exist from 2.15 on."""


def learn_shapes_alone(kind: type[Any]) -> None:
    """Makes stages of this class learn their shapes without peers, which a replacement rank does not have.

    They learn them by running, and the result is compared with the shapes that the trainer has declared.
    """
    schedule: Any = schedules._PipelineSchedule
    settle = getattr(schedule, SETTLE)

    def alone(self: Any, stages: list[Any], *args: Any, **kwargs: Any) -> None:
        if not all(isinstance(stage, kind) for stage in stages):
            settle(self, stages, *args, **kwargs)
            return
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.DYNAMIC

    setattr(schedule, SETTLE, alone)


def sends_gradient(stage: Any, index: int) -> bool:
    """Returns whether the stage sends a gradient for its input at `index`. Up to 2.12: for each input from another
    stage."""
    return not hasattr(stage, "_get_grad_send_meta") or stage._get_grad_send_meta(index) is not None


def keeps_buffer(info: Any) -> bool:
    """Returns whether a receive's buffer is its microbatch's for good, and older than the call of the schedule: before
    2.15."""
    return not hasattr(info, "take_buffer")


def forget_receives(infos: Sequence[Any]) -> None:
    """Drops a microbatch's receive buffers, which will not be used. From 2.15 on each receive has its own buffer, and
    refuses a second one; before, a buffer belongs to the microbatch for good."""
    for info in infos:
        if not keeps_buffer(info):
            info.buffer = None


def forget_reduction(stage: Any) -> None:
    """Drops an FSDP2 reduction of an interrupted step. From 2.15 on the stage would wait for it."""
    if hasattr(stage, "_gradient_reduction_handle"):
        stage._gradient_reduction_handle = None


def forget_accumulated(parameter: Any) -> None:
    """(FSDP2) Drops gradients of microbatches that were not reduced yet. From 2.15 on the unsharded parameter holds
    them."""
    if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
        parameter.unsharded_accumulated_grad = None


# Private names of torch that swift uses; those of a backend are in its module.
#
# They are checked at import: a torch that lacks some is refused with their names, instead of an AttributeError in the
# middle of a run. Differences between versions are at the top.

_NEEDED = {
    "torch.distributed.distributed_c10d": (
        _c10d,
        (
            "_world",
            "_update_default_pg",
            "_object_to_tensor",
            "_tensor_to_object",
            "_get_object_coll_device",
        ),
    ),
    "torch._C": (torch._C, ("_current_graph_task_id", "_DisableFuncTorch")),
    "torch.utils._python_dispatch": (_python_dispatch, ("_disable_current_modes",)),
    "torch._C._distributed_c10d": (
        _backends,
        ("_register_process_group",),
    ),
    "torch.distributed.pipelining.stage": (
        _stage,
        ("_PipelineStage", "_PipelineStageBase"),
    ),
    "torch.distributed.pipelining._utils": (
        _utils,
        ("_TensorMeta", "_StageForwardMeta", "_StageBackwardMeta", "InferenceMode"),
    ),
    "torch.distributed.pipelining.schedules": (
        _schedules,
        ("_PipelineSchedule", "_PipelineScheduleRuntime"),
    ),
    "torch.distributed.pipelining.schedules._PipelineSchedule": (
        _schedules._PipelineSchedule,
        ("_compute_loss", "_initialize_pp_stages", "_step_microbatches", SETTLE),
    ),
    "torch.distributed.pipelining.stage.PipelineStage": (
        PipelineStage,
        (
            "_recv_meta",
            "_send_meta",
            "_forward_metadata_inference",
            "_backward_metadata_inference",
            "_compute_outputs",
            "_post_metadata_inference_cleanup",
            "get_fwd_recv_ops",
            "get_bwd_recv_ops",
            "get_fwd_send_ops",
            "get_bwd_send_ops",
            "clear_runtime_states",
            "scale_grads",
            "perform_reduce_grad",
            "backward_weight_one_chunk",
            "set_local_fwd_input",
            "set_local_bwd_input",
            "get_local_bwd_output",
            "forward_one_chunk",
            "backward_one_chunk",
        ),
    ),
    "torch.utils.data.dataloader._BaseDataLoaderIter": (dataloader._BaseDataLoaderIter, ("_next_data",)),
    "torch.distributed.fsdp.FSDPModule": (FSDPModule, ("_get_fsdp_state",)),
    "torch": (torch, ("_foreach_copy_",)),
    "torch.Tensor": (torch.Tensor, ("_version", "_is_zerotensor")),
    "torch.optim.Optimizer": (torch.optim.Optimizer, ("_process_value_according_to_param_policy",)),
    "torch.optim.optimizer": (
        _optimizer,
        ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    ),
}


def require(needed: Mapping[str, tuple[Any, Sequence[str]]]) -> None:
    """Checks that each object of torch has its names (where -> object, names). Raises ServiceError with the missing
    ones."""
    missing = [
        f"{where}.{name}"
        for where, (owner, names) in needed.items()
        for name in names
        if not hasattr(owner, name)
    ]
    if missing:
        raise ServiceError(
            f"torch {torch.__version__} lacks what swift builds on: {', '.join(missing)}; install a version of "
            "docs/compatibility.md, such as 2.13"
        )


require(_NEEDED)

ProcessGroup: Any = dist.ProcessGroup  # its stub has overloads that a subclass cannot repeat
Work = dist.Work
StageBase = _stage._PipelineStageBase
TracedStage = _stage._PipelineStage
Schedule = _schedules._PipelineSchedule
TensorMeta = _utils._TensorMeta
_DTensorMeta: Any = getattr(_utils, "_DTensorMeta", None)
"""Metadata of DTensors between stages: from 2.13 on."""
_FlatLayout: Any = getattr(_mesh_layout, "_FlatLayout", None)
_MeshLayout: Any = _mesh_layout._MeshLayout
_PLACEMENTS: dict[str, Any] = {"shard": Shard, "partial": Partial, "replicate": Replicate}
ForwardMeta = _utils._StageForwardMeta
BackwardMeta = _utils._StageBackwardMeta


def schedule_stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def schedule_microbatches(schedule: Any) -> int:
    return int(schedule._n_microbatches)


def schedule_grad_scale(schedule: Any) -> int:
    """Returns the number by which the schedule divides a step's gradients."""
    return schedule_microbatches(schedule) if schedule.scale_grads else 1


def splits_backward(schedule: Any) -> bool:
    return isinstance(
        schedule,
        _schedules.ScheduleInterleavedZeroBubble
        | _schedules.ScheduleZBVZeroBubble
        | _schedules.ScheduleDualPipeV,
    )


def schedule_actions(schedule: Any) -> list[tuple[int, str, int]] | None:
    """Returns this rank's computations of a step in order, as (stage, F, B, I or W, microbatch). None if unknown."""
    count = schedule_microbatches(schedule)
    if type(schedule) in (_schedules.ScheduleGPipe, _schedules.Schedule1F1B):
        stage = schedule._stage.stage_index
        ahead = count if type(schedule) is _schedules.ScheduleGPipe else schedule._num_stages - stage
        actions = [(stage, "F", mb) for mb in range(min(ahead, count))]
        for mb in range(count):
            actions.append((stage, "B", mb))
            if mb + ahead < count:
                actions.append((stage, "F", mb + ahead))
        return actions
    runtime = _schedules._PipelineScheduleRuntime
    # A function of the trainer may compute anything.
    if getattr(type(schedule), "_step_microbatches", None) is not runtime._step_microbatches:
        return None
    if schedule._comp_type_to_function_map:
        return None
    return list(actions_of(schedule.pipeline_order_with_comms[schedule.rank]))


def actions_of(actions: Iterable[Any]) -> Iterator[tuple[int, str, int]]:
    """Yields (stage, F, B, I or W, microbatch) of those torch actions that compute."""
    for action in actions:
        if action.sub_actions is not None:
            yield from actions_of(action.sub_actions)
        elif action.is_compute_op:
            yield action.stage_index, action.computation_type.value, action.microbatch_index


def loss_function(schedule: Any) -> Any:
    """Returns the trainer's loss function, without the wrapper of `wrap_loss`."""
    return getattr(schedule._loss_fn, "__wrapped__", schedule._loss_fn)


def gradient_hooks(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a hook sees or changes the parameter's gradients."""
    return bool(parameter._backward_hooks) or has_sum_hooks(parameter)


def has_sum_hooks(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a hook sees or changes the gradient that autograd has accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def forget_unscaled(scaler: Any) -> None:
    """Lets the scaler unscale again in a step that is repeated. It refuses a second unscale between two updates."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


def found_infinite(scaler: Any, optimizer: Any, device: torch.device) -> list[torch.Tensor]:
    """Returns the flags that `unscale_` of an enabled scaler has left, per device: 1.0 if it found inf or nan. For an
    optimizer without gradients a 0.0 on this device is added: otherwise the scaler refuses a step and an update."""
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ]
    if not found:
        found[device] = torch.zeros((), device=device)
    return list(found.values())


def wrap_loss(schedule: Any, wrapper: Any) -> None:
    """Replaces the schedule's loss function, if it has one, by ``wrapper(loss_fn)``."""
    if schedule._loss_fn is not None:
        schedule._loss_fn = wrapper(schedule._loss_fn)


def why_ddp_is_refused(module: torch.nn.Module) -> str:
    """Returns why a DistributedDataParallel in the module cannot be recovered; empty if there is no reason."""
    wrappers = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    for hook in (hook for wrapper in wrappers for hook, _ in wrapper._comm_hooks):
        return (
            f"a DistributedDataParallel has a communication hook ({getattr(hook, '__name__', type(hook).__name__)}): a "
            "reduction that a failure cuts short in a hook cannot be taken back; leave register_comm_hook out"
        )
    if any(wrapper.static_graph for wrapper in wrappers):
        return (
            "a DistributedDataParallel has a static graph, which it learns in its first step: a process that replaces "
            "a lost rank has not seen that step; leave static_graph=True (or _set_static_graph) out"
        )
    return ""


def loss_functions(schedules: list[Any]) -> list[Any]:
    return [schedule._loss_fn for schedule in schedules if schedule._loss_fn is not None]


def is_transformed() -> bool:
    """Returns whether `torch.func.grad`, `vmap` or the like is active: then a tensor is a placeholder without data."""
    return _functorch.peek_interpreter_stack() is not None


_UNDER_WAY = ("fwd_recv_ops", "bwd_recv_ops", "backward_counter")


def clear_schedule(schedule: Any) -> None:
    """Drops the state of an interrupted step. A successful step clears all of it itself."""
    schedule._internal_losses.clear()
    # Only a looped schedule has these. GATHERED: gathered stages (FSDP2), which `reset_sharded` resets.
    for name in (*_UNDER_WAY, *GATHERED):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    for stage in schedule_stages(schedule):
        forget_reduction(stage)
        stage.clear_runtime_states()
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            forget_receives(infos)
        for cache in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            cache.clear()


def reset_sharded(module: torch.nn.Module) -> None:
    """Resets FSDP2 modules to their state between two steps, wherever a forward or backward was interrupted.

    torch's own reset waits for the collective that broke, and keeps the gradients of microbatches that were not reduced
    yet: the repeated step would add to them (both measured with 2.13).
    """
    for part in module.modules():
        # Before the first forward no module is a root, and no reset is needed.
        if not isinstance(part, FSDPModule) or not part._get_fsdp_state()._is_root:
            continue
        for state in part._get_fsdp_state()._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group._all_gather_result = None
                for parameter in group.fsdp_params:
                    forget_accumulated(parameter)
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
        part.reset_iter_state()
        # Pipeline stages switch these off for all microbatches but the last.
        part.set_is_last_backward(True)
        part.set_reshard_after_backward(True)
        part.set_requires_gradient_sync(True)


def sharded_by_fsdp(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    return {
        parameter.sharded_param
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    }


_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@contextmanager
def without_hooks_of_authors(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Lets `state_dict` and `load_state_dict` of the module call no hooks but torch's own (FSDP2's, say) for the
    duration. Other hooks give the state the form of a file: they copy, rename, and gather from other ranks."""
    taken: list[tuple[torch.nn.Module, str, Any]] = []
    for part in module.modules():
        for name in _STATE_HOOKS:
            hooks = vars(part).get(name) or {}
            if any(not _is_of_torch(hook) for hook in hooks.values()):
                taken.append((part, name, hooks))
                kept = ((key, hook) for key, hook in hooks.items() if _is_of_torch(hook))
                vars(part)[name] = OrderedDict(kept)
    try:
        yield module
    finally:
        for part, name, hooks in taken:
            vars(part)[name] = hooks


def _is_of_torch(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # it is wrapped with its module
    hook = getattr(hook, "func", hook)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return bool(module.partition(".")[0] == "torch")


def keep_reference(module: DistributedDataParallel) -> None:
    """Keeps DDP's weak reference to itself from being cleared in the middle of a step.

    DDP's backward finds it in its autograd node, and Python has one such reference for all nodes. If another thread
    collects garbage while torch, without holding the GIL, gives the node a second owner, the collector first takes node
    and reference for garbage and clears the reference for good ("NoneType has no attribute reducer"). A reference that
    is also held here is never taken for garbage.
    """
    _references[module] = weakref.ref(module)


_references: "weakref.WeakKeyDictionary[DistributedDataParallel, Any]" = weakref.WeakKeyDictionary()


def meta_to_json(metas: Iterable[Any]) -> list[Any]:
    """Converts tensor metadata to JSON. A DTensor's names its mesh by dimensions and layout, as torch does. Raises
    ServiceError for other kinds."""
    out: list[Any] = []
    for meta in metas:
        if meta is None:
            out.append(None)
            continue
        if type(meta) not in (TensorMeta, _DTensorMeta):
            raise ServiceError(f"a boundary tensor with metadata {type(meta).__name__} cannot be logged yet")
        item = {
            "shape": list(meta.shape),
            "stride": list(meta.stride),
            "dtype": str(meta.dtype).removeprefix("torch."),
            "requires_grad": bool(meta.requires_grad),
        }
        if type(meta) is _DTensorMeta:
            item |= {
                "global_shape": list(meta.global_shape),
                "global_stride": list(meta.global_stride),
                "placements": [_placement_to_json(placement) for placement in meta.placements],
                "mesh_dim_names": list(meta.mesh_dim_names),
                "mesh_layout": [[axis.shape, axis.stride] for axis in meta.mesh_layout.axes],
            }
        out.append(item)
    return out


def meta_from_json(items: list[Any]) -> tuple[Any, ...]:
    """Restores the tensor metadata of a stage from the result of `meta_to_json`."""
    return tuple(None if item is None else _meta_from_json(item) for item in items)


def _meta_from_json(item: dict[str, Any]) -> Any:
    known = {
        "shape": torch.Size(item["shape"]),
        "stride": tuple(item["stride"]),
        "dtype": getattr(torch, item["dtype"]),
        "requires_grad": item["requires_grad"],
    }
    if "mesh_layout" not in item:
        return TensorMeta(**known)
    return _DTensorMeta(
        **known,
        global_shape=torch.Size(item["global_shape"]),
        global_stride=tuple(item["global_stride"]),
        placements=tuple(_PLACEMENTS[kind](*of) for kind, *of in item["placements"]),
        mesh_dim_names=tuple(item["mesh_dim_names"]),
        mesh_layout=_MeshLayout(
            [_FlatLayout(tuple(shape), tuple(stride)) for shape, stride in item["mesh_layout"]]
        ),
    )


def _placement_to_json(placement: Any) -> list[Any]:
    for kind, of in (("shard", "dim"), ("partial", "reduce_op"), ("replicate", "")):
        if type(placement) is _PLACEMENTS[kind]:
            return [kind, getattr(placement, of)] if of else [kind]
    raise ServiceError(f"a boundary tensor that is laid out by {placement} cannot be logged yet")


def around_calls(schedule: Any, around: Any) -> None:
    """Makes the schedule run its microbatches, for training and for evaluation, inside of ``around()``."""
    inner = schedule._step_microbatches

    def step_microbatches(*args: Any, **kwargs: Any) -> Any:
        with around():
            return inner(*args, **kwargs)

    schedule._step_microbatches = step_microbatches


def take_microbatches(schedule: Any) -> None:
    """Lets ``schedule.step`` take a batch that is split already: ``arg_mbs``, ``kwarg_mbs`` and ``target_mbs``, a list
    with an entry for each microbatch. torchtitan calls it so; torch has these arguments from 2.14 on."""
    whole = schedule.step
    if "arg_mbs" in inspect.signature(whole).parameters:
        return

    def step(
        *args: Any,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        more = {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            return whole(*args, **more, **kwargs)
        for stage in schedule_stages(schedule):
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        count = schedule_microbatches(schedule)
        schedule._step_microbatches(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, target_mbs, **more)
        return None

    schedule.step = step


def knows_shapes(schedule: Any) -> bool:
    """Returns whether the schedule's next call needs to learn no shapes."""
    names = ("_stage_forward_initialized", "_stages_forward_initialized")
    name = next(name for name in names if hasattr(schedule, name))
    backward = getattr(schedule, name.replace("forward", "backward"))
    return getattr(schedule, name) and bool(backward) == bool(schedule._has_backward)


def forget_shapes(schedule: Any) -> None:
    for name in ("_stage_forward_initialized", "_stages_forward_initialized"):
        if hasattr(schedule, name):
            setattr(schedule, name, False)
            setattr(schedule, name.replace("forward", "backward"), False)


def make_iterators_by(call: Any, begins: Any) -> None:
    """Makes ``iter(loader)`` of every DataLoader return ``call(loader, torch's own)``. Each iterator is initialized by
    ``begins(iterator, loader, torch's own)``, also one that another package creates in its own way."""

    def make(self: Any) -> Any:
        return call(self, _iter)

    DataLoader.__iter__ = make  # type: ignore[method-assign]

    def begin(self: Any, loader: Any) -> None:
        begins(self, loader, _iterator_begins)

    dataloader._BaseDataLoaderIter.__init__ = begin  # type: ignore[method-assign]


def start_workers_anew(loader: Any) -> None:
    """Drops the loader's persistent workers, so that the next iterator starts new ones."""
    loader._iterator = None


def undo_patches() -> None:
    """Undoes `make_iterators_by`, `carry_objects_by`, `split_by_new_groups` and `keep_reference`."""
    _references.clear()
    DataLoader.__iter__ = _iter  # type: ignore[method-assign]
    dataloader._BaseDataLoaderIter.__init__ = _iterator_begins  # type: ignore[method-assign]
    _c10d._object_to_tensor, _c10d._tensor_to_object = _object_to_tensor, _tensor_to_object
    _c10d.broadcast_object_list = dist.broadcast_object_list = _broadcast_object_list
    _c10d.split_group = dist.split_group = _split_group


_iter = DataLoader.__iter__
_iterator_begins = dataloader._BaseDataLoaderIter.__init__


def is_compiled(module: torch.nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    )


def has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def push_mode(mode: Any) -> None:
    overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def remove_mode(mode: Any) -> None:
    """Leaves a mode of this thread, keeping the modes entered after it. Does nothing if it is not active here."""
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if mode in modes:
        after = modes[modes.index(mode) :]
        for _ in after:
            overrides._pop_mode()  # type: ignore[no-untyped-call]
        for other in after[1:]:
            overrides._push_mode(other)  # type: ignore[no-untyped-call]


def is_innermost_mode(mode: Any) -> bool:
    return overrides._get_current_function_mode() is mode  # type: ignore[no-untyped-call]


def without_modes() -> Any:
    """Returns a context manager without any `TorchFunctionMode`. It is torch's own, in C, and cheap."""
    return torch._C.DisableTorchFunction()


def is_in_backward() -> bool:
    """Returns whether this thread runs a backward: then a forward is a recomputation (`torch.utils.checkpoint`)."""
    return int(torch._C._current_graph_task_id()) != -1


def digest_of_generator() -> int:
    """Returns a digest of the CPU generator's state. Modes are disabled: under `torch.func.grad` or a tracer the state
    would be a placeholder tensor without data."""
    with torch._C._DisableFuncTorch(), _python_dispatch._disable_current_modes():
        return xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().data)


class ModuleHook:
    """A forward hook of a trainer's module, which may be copied, pickled or compiled: a copy's hook does nothing."""

    def __init__(self, call: Any = None) -> None:
        """`call` is called with what torch gives a hook besides the module."""
        self._call = call

    def __call__(self, module: torch.nn.Module, *given: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*given)

    def __deepcopy__(self, memo: Any) -> "ModuleHook":
        return ModuleHook()

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        return ModuleHook, ()


# --- process groups that swift creates ---


def make_default(group: Any) -> None:
    """Makes `group`, which torch knows, the default group. Destroying the default group destroys this one as well."""
    _c10d._update_default_pg(group)


def carry_objects_by(encode: Any, decode: Any, active: Any) -> None:
    """Makes torch's collectives of Python objects carry ``encode(object)``, bytes, in place of pickles, while
    ``active()``."""

    def to_tensor(value: Any, device: Any, group: Any) -> Any:
        if not active():
            return _object_to_tensor(value, device, group)
        data = encode(value)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device, copy=True)  # it is resized
        return tensor, torch.tensor([len(data)], dtype=torch.int64, device=device)

    def to_object(tensor: torch.Tensor, size: Any, group: Any) -> Any:
        if not active():
            return _tensor_to_object(tensor, size, group)
        return decode(tensor.cpu().numpy().tobytes()[: int(size)])

    def broadcast(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Fills the list in on the source as well: a process that replaces it may have come with other objects."""
        root = {"src": src} if group_src is None else {"group_src": group_src}
        if not active() or (group is not None and group not in _c10d._world.pg_map):
            _broadcast_object_list(object_list, device=device, group=group, **root)
            return
        is_root = dist.get_rank() == (src or 0) if group_src is None else dist.get_rank(group) == group_src
        data = encode(object_list) if is_root else b""
        device = device or _c10d._get_object_coll_device(group)
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, group=group, **root)
        own = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8)[: int(size)].to(device)
        dist.broadcast(own, group=group, **root)
        object_list[:] = decode(own.cpu().numpy().tobytes())

    _c10d._object_to_tensor, _c10d._tensor_to_object = to_tensor, to_object
    _c10d.broadcast_object_list = dist.broadcast_object_list = broadcast


def split_by_new_groups(active: Any) -> None:
    """Makes `dist.split_group`, for which torch needs a communicator that splits, make its groups by `dist.new_group`
    while ``active()``."""

    def split(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (active() and split_ranks):
            return _split_group(parent_pg, split_ranks, *args, **kwargs)
        ranks = dist.get_process_group_ranks(parent_pg)
        if len(ranks) < dist.get_world_size():
            raise UsageError(
                "dist.split_group of a group without all ranks: the others would not know of its parts, and all make "
                "the same groups in the same order; use dist.new_group, on all ranks"
            )
        groups = [dist.new_group([ranks[place] for place in sorted(part)]) for part in split_ranks]
        return next((group for group in groups if isinstance(group, dist.ProcessGroup)), None)

    _c10d.split_group = dist.split_group = split


_object_to_tensor: Any = _c10d._object_to_tensor
_tensor_to_object: Any = _c10d._tensor_to_object
_broadcast_object_list: Any = _c10d.broadcast_object_list
_split_group: Any = _c10d.split_group


def reduction_name(op: Any) -> str:
    """Returns the name of a reduction; None is a sum."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    reductions = dist.ReduceOp
    return next(
        (n for n in names if op is not None and op == getattr(reductions, n)),
        "SUM" if op is None else str(op),
    )


def give_placeholder(group: Any, name: str, backend: "Backend") -> None:
    """Gives the group a placeholder backend: without one a Python group cannot have a name, and DDP looks for one of
    its kind."""
    kind = getattr(dist.ProcessGroup.BackendType, backend.name.upper(), dist.ProcessGroup.BackendType.CUSTOM)
    placeholder = backend.placeholder()
    for device in device_types():
        group._register_backend(torch.device(device), kind, placeholder)
    group._set_default_backend(kind)
    group._set_group_name(name)
    group._set_group_desc(name)


def register_group(group: Any, name: str, ranks: tuple[int, ...], backend: "Backend") -> None:
    """Registers a group of swift's with torch. Destroying the default group makes torch forget it."""
    world: Any = _c10d._world
    world.pg_map[group] = (backend.name, dist.HashStore())  # type: ignore[attr-defined]
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = ",".join(f"{device}:{backend.name}" for device in device_types())
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    _backends._register_process_group(name, group)  # type: ignore[arg-type]


def count_groups(made: int) -> None:
    """Sets the number of groups that torch has named so far. Destroying the default group resets it."""
    _c10d._world.group_count = made


# Optimizers.

copy_all: Callable[..., None] = torch._foreach_copy_
"""Copies each tensor of the second list into that of the first one."""


@contextmanager
def state_left_alone() -> Iterator[None]:
    """Makes optimizers load a state's tensors unchanged, without a cast to their parameters' dtype."""
    base: Any = torch.optim.Optimizer
    policy = base.__dict__["_process_value_according_to_param_policy"]

    def as_it_is(param: Any, value: Any, *_: Any, **__: Any) -> Any:
        return value

    base._process_value_according_to_param_policy = staticmethod(as_it_is)
    try:
        yield
    finally:
        base._process_value_according_to_param_policy = policy


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's elements are those in its memory, one after another."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor._is_zerotensor()


def pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls before `optimizer`'s step, in its order: global ones, then its own."""
    own = optimizer._optimizer_step_pre_hooks
    return [*_optimizer._global_optimizer_pre_hooks.values(), *own.values()]


def post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls after `optimizer`'s step, in its order: its own, then global ones."""
    own = optimizer._optimizer_step_post_hooks
    return [*own.values(), *_optimizer._global_optimizer_post_hooks.values()]


def own_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_post_hooks)


def bare_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Returns the class's step without torch's wrapper that calls the hooks."""
    step = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
