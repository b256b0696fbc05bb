"""What differs between the versions of torch that swift works with (docs/compatibility.md).

Each function asks for what is there, never for a version: a torch that changes again is refused at import with the name
that it lacks, or goes on to work.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import overrides
from torch._C import _distributed_c10d as _backends
from torch._C import _functorch
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.distributed.pipelining import PipelineStage, _utils, schedules
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.pipelining import stage as _stage
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch
from torch.utils.data import DataLoader, dataloader

from swift_ft.errors import ServiceError

if TYPE_CHECKING:
    from swift_ft.comm.backend import Backend


_SETTLING = ("_initialize_pipeline_distributed_state", "_warmup_p2p")
SETTLE = next((name for name in _SETTLING if hasattr(schedules._PipelineSchedule, name)), _SETTLING[0])
"""The method of a schedule in which its stages settle with their peers how they learn shapes: from 2.15 on, before."""

RESETS_SHARDED = hasattr(FSDPModule, "reset_iter_state")
"""FSDP2 modules can be taken back out of the middle of a step: from 2.13 on. Without it `session.mesh` is refused."""

GATHERED = ("unshard_ops", "unsharded_stages", "_deferred_stages", "_finalized_stages")
"""Where a looped schedule notes which stages are gathered (FSDP2). The last two: from 2.15 on."""


def learn_shapes_alone(kind: type[Any]) -> None:
    """Under every schedule, stages of this class learn their shapes without peers, which a replacement does not have.

    By running: what a trainer has said of shapes is compared with it.
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
    """Of its input at this place. Up to 2.12: of each that another stage sends."""
    return not hasattr(stage, "_get_grad_send_meta") or stage._get_grad_send_meta(index) is not None


def forget_receives(infos: Sequence[Any]) -> None:
    """Of a microbatch: buffers that nothing will be computed with. From 2.15 on each receive has one of its own, and
    refuses a second one; before, a buffer is the microbatch's for good."""
    for info in infos:
        if hasattr(info, "take_buffer"):
            info.buffer = None


def forget_reduction(stage: Any) -> None:
    """One of FSDP2's that a step was cut short in. From 2.15 on the stage would wait for it."""
    if hasattr(stage, "_gradient_reduction_handle"):
        stage._gradient_reduction_handle = None


def forget_accumulated(parameter: Any) -> None:
    """(FSDP2) Gradients of microbatches that were not reduced yet. From 2.15 on they are the unsharded parameter's."""
    if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
        parameter.unsharded_accumulated_grad = None


# Every private name of torch that swift touches, in one place; a backend's own are in its module.
#
# Checked at import: a torch that lacks one of them is refused with the names that are missing, instead of an
# AttributeError in the middle of a run. What differs between versions is at the top.

_NEEDED = {
    "torch.distributed.distributed_c10d": (
        _c10d,
        (
            "_world",
            "GroupName",
            "ProcessGroup",
            "_update_default_pg",
            "_object_to_tensor",
        ),
    ),
    "torch._C": (torch._C, ("_current_graph_task_id", "_DisableFuncTorch")),
    "torch.utils._python_dispatch": (_python_dispatch, ("_disable_current_modes",)),
    "torch._C._distributed_c10d": (
        _backends,
        ("HashStore", "ReduceOp", "Work", "_register_process_group"),
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
    "torch's FSDPState": (_fsdp_state.FSDPState, ("_lazy_init",)),
    "torch's FSDPParamGroup": (_fsdp_param_group.FSDPParamGroup, ("unshard",)),
}


def require(needed: Mapping[str, tuple[Any, Sequence[str]]]) -> None:
    """where → (an object of torch's, names that it must have). Raises ServiceError with those that it lacks."""
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

ProcessGroup: Any = _c10d.ProcessGroup  # its stub has overloads that a subclass cannot repeat
Work = _backends.Work
StageBase = _stage._PipelineStageBase
TracedStage = _stage._PipelineStage
Schedule = _schedules._PipelineSchedule
TensorMeta = _utils._TensorMeta
ForwardMeta = _utils._StageForwardMeta
BackwardMeta = _utils._StageBackwardMeta


def schedule_stages(schedule: Any) -> list[Any]:
    """The stages of a single-stage or looped schedule."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def schedule_microbatches(schedule: Any) -> int:
    return int(schedule._n_microbatches)


def trains(schedule: Any) -> bool:
    """Its calls compute gradients, but those of `eval`."""
    return schedule._loss_fn is not None


def schedule_grad_scale(schedule: Any) -> int:
    """What the schedule divides a step's gradients by."""
    return schedule_microbatches(schedule) if schedule.scale_grads else 1


def started(ops: Sequence[Any]) -> list[Any]:
    """What a schedule does with the operations that a stage gives to it, and waits for later."""
    return list(dist.batch_isend_irecv(list(ops))) if ops else []


def splits_backward(schedule: Any) -> bool:
    """A schedule that computes input and weight gradients apart."""
    return isinstance(
        schedule,
        _schedules.ScheduleInterleavedZeroBubble
        | _schedules.ScheduleZBVZeroBubble
        | _schedules.ScheduleDualPipeV,
    )


def schedule_actions(schedule: Any) -> list[tuple[int, str, int]] | None:
    """(stage, F, B, I or W, microbatch): what this rank computes in a step, in this order. None: nobody knows."""
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
    # A function of the trainer's may compute whatever it likes.
    if getattr(type(schedule), "_step_microbatches", None) is not runtime._step_microbatches:
        return None
    if schedule._comp_type_to_function_map:
        return None
    return list(actions_of(schedule.pipeline_order_with_comms[schedule.rank]))


def actions_of(actions: Iterable[Any]) -> Iterator[tuple[int, str, int]]:
    """(stage, F, B, I or W, microbatch) of those of torch's actions that compute."""
    for action in actions:
        if action.sub_actions is not None:
            yield from actions_of(action.sub_actions)
        elif action.is_compute_op:
            yield action.stage_index, action.computation_type.value, action.microbatch_index


def loss_function(schedule: Any) -> Any:
    """The trainer's own, without what `wrap_loss` has put around it."""
    return getattr(schedule._loss_fn, "__wrapped__", schedule._loss_fn)


def gradient_hooks(parameter: torch.nn.Parameter) -> bool:
    """Somebody is told of the parameter's gradients, or changes them."""
    return bool(parameter._backward_hooks) or told_of_sums(parameter)


def told_of_sums(parameter: torch.nn.Parameter) -> bool:
    """Somebody is told of what autograd has added up so far, or changes it."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def forget_unscaled(scaler: Any) -> None:
    """A gradient scaler refuses to unscale twice between two updates; the first time was in a dropped step."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


def found_infinite(scaler: Any, optimizer: Any, device: torch.device) -> list[torch.Tensor]:
    """What `unscale_` has left, of an enabled scaler: 1.0 if it has met inf or nan, by device. Of an optimizer without
    gradients it is 0.0 on this device: a step and an update of the scaler would be refused otherwise."""
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ]
    if not found:
        found[device] = torch.zeros((), device=device)
    return list(found.values())


def wrap_loss(schedule: Any, wrapper: Any) -> None:
    """Puts ``wrapper(loss_fn)`` in the place of the schedule's loss function, if it has one."""
    if schedule._loss_fn is not None:
        schedule._loss_fn = wrapper(schedule._loss_fn)


def why_ddp_is_refused(module: torch.nn.Module) -> str:
    """What a DistributedDataParallel in it has that a recovery cannot give back; empty: nothing."""
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


def is_transformed(tensor: torch.Tensor | None = None) -> bool:
    """`torch.func.grad`, `vmap` or the like is at work, or has made this tensor: a placeholder, without bits."""
    if tensor is not None:
        return bool(_functorch.is_functorch_wrapped_tensor(tensor))
    return _functorch.peek_interpreter_stack() is not None


_UNDER_WAY = ("fwd_recv_ops", "bwd_recv_ops", "backward_counter")


def clear_schedule(schedule: Any) -> None:
    """Forgets a half-done step. A successful step leaves all of these empty itself."""
    schedule._internal_losses.clear()
    # A looped schedule's own. It notes which stages are gathered (FSDP2), which `reset_sharded` takes back.
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
    """Takes FSDP2 modules back to where they are between two steps, whatever a forward or backward was cut short in.

    torch's own reset waits for the collective that broke, and keeps the gradients of microbatches that were not
    reduced yet: the step that is done again would add to them (both measured with 2.13).
    """
    for part in module.modules():
        # Before its first forward nobody is a root, and there is nothing to reset.
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


def keep_reference(module: DistributedDataParallel) -> None:
    """Keeps DDP's weak reference to itself from being cleared in the middle of a step.

    DDP's backward finds it in its autograd node, and Python has one such reference for all nodes. If another thread
    collects garbage while torch, without the interpreter's lock, gives the node a second owner, the collector
    takes node and reference for garbage at first and clears the reference, for good ("NoneType has no attribute
    reducer"). Held elsewhere as well, the reference is never taken for garbage.
    """
    _references[module] = weakref.ref(module)


_references: "weakref.WeakKeyDictionary[DistributedDataParallel, Any]" = weakref.WeakKeyDictionary()


def meta_to_json(metas: Iterable[Any]) -> list[Any]:
    """Tensor metadata as JSON. DTensor metadata is not supported: it names a mesh of live process groups. Raises
    ServiceError for it, and for any other kind."""
    out: list[Any] = []
    for meta in metas:
        if meta is None:
            out.append(None)
        elif isinstance(meta, TensorMeta):
            out.append(
                {
                    "shape": list(meta.shape),
                    "stride": list(meta.stride),
                    "dtype": str(meta.dtype).removeprefix("torch."),
                    "requires_grad": bool(meta.requires_grad),
                }
            )
        else:
            raise ServiceError(f"a boundary tensor with metadata {type(meta).__name__} cannot be logged yet")
    return out


def meta_from_json(items: list[Any]) -> tuple[Any, ...]:
    """Shapes, strides and dtypes that a stage receives or sends, out of what `meta_to_json` has made of them."""
    return tuple(
        None
        if item is None
        else TensorMeta(
            shape=torch.Size(item["shape"]),
            stride=tuple(item["stride"]),
            dtype=getattr(torch, item["dtype"]),
            requires_grad=item["requires_grad"],
        )
        for item in items
    )


def set_generator_seed(seed: int, device: torch.device | None) -> None:
    """Seeds the default generators: the host's, and that of `device`. The host's takes 1 µs where `torch.manual_seed`
    takes 72."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def generator_states() -> list[torch.Tensor]:
    """Of the default generators: the CPU's, then each CUDA device's that is in use."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += [generator.get_state() for generator in torch.cuda.default_generators]
    return states


def set_generator_states(states: Sequence[torch.Tensor]) -> None:
    """As `generator_states` gave them."""
    torch.default_generator.set_state(states[0])
    for generator, state in zip(torch.cuda.default_generators, states[1:], strict=False):
        generator.set_state(state)


def around_calls(schedule: Any, around: Any) -> None:
    """The schedule runs its microbatches, for training and for evaluation, inside of ``around()``."""
    inner = schedule._step_microbatches

    def step_microbatches(*args: Any, **kwargs: Any) -> Any:
        with around():
            return inner(*args, **kwargs)

    schedule._step_microbatches = step_microbatches


def knows_shapes(schedule: Any) -> bool:
    """Its next call learns none."""
    names = ("_stage_forward_initialized", "_stages_forward_initialized")
    name = next(name for name in names if hasattr(schedule, name))
    backward = getattr(schedule, name.replace("forward", "backward"))
    return getattr(schedule, name) and bool(backward) == bool(schedule._has_backward)


def forget_shapes(schedule: Any) -> None:
    """Its next call learns them again."""
    for name in ("_stage_forward_initialized", "_stages_forward_initialized"):
        if hasattr(schedule, name):
            setattr(schedule, name, False)
            setattr(schedule, name.replace("forward", "backward"), False)


def make_iterators_by(call: Any, begins: Any) -> None:
    """``iter(loader)`` of every DataLoader is ``call(loader, torch's own)`` from here on. Each iterator begins by
    ``begins(iterator, loader, torch's own)``, also where a class of another package makes it in its own way."""

    def make(self: Any) -> Any:
        return call(self, _iter)

    DataLoader.__iter__ = make  # type: ignore[method-assign]

    def begin(self: Any, loader: Any) -> None:
        begins(self, loader, _iterator_begins)

    dataloader._BaseDataLoaderIter.__init__ = begin  # type: ignore[method-assign]


def start_workers_anew(loader: Any) -> None:
    """(an iterator of it is about to be made) Workers of the one before (`persistent_workers`) are not used again."""
    loader._iterator = None


def let_go() -> None:
    """torch is as it was before `make_iterators_by`, `before_pickling` and `keep_reference`."""
    _references.clear()
    DataLoader.__iter__ = _iter  # type: ignore[method-assign]
    dataloader._BaseDataLoaderIter.__init__ = _iterator_begins  # type: ignore[method-assign]
    _c10d._object_to_tensor = _object_to_tensor


_iter = DataLoader.__iter__
_iterator_begins = dataloader._BaseDataLoaderIter.__init__


def is_compiled(module: torch.nn.Module) -> bool:
    """Its forward is not carried out by Python: torch.compile's, or TorchScript."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    )


def has_compiled() -> bool:
    """torch.compile was called in this process."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def push_mode(mode: Any) -> None:
    """A `TorchFunctionMode` begins in this thread."""
    overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def remove_mode(mode: Any) -> None:
    """It ends, though others have begun since and go on. Nothing if it is none of this thread's."""
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
    """``with`` it: no `TorchFunctionMode` is asked. Torch's own, in C: it costs nothing."""
    return torch._C.DisableTorchFunction()


def is_in_backward() -> bool:
    """This thread computes gradients: a forward in here is one that is done again (`torch.utils.checkpoint`)."""
    return int(torch._C._current_graph_task_id()) != -1


def digest_of_generator() -> int:
    """Of torch's on the CPU, as it stands. Its state is a tensor: under `torch.func.grad` or a tracer it would be a
    placeholder, without bits."""
    with torch._C._DisableFuncTorch(), _python_dispatch._disable_current_modes():
        return xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().data)


def before_forward(module: torch.nn.Module, call: Any) -> None:
    """``call()`` before each forward of this very module, not of copies."""
    module.register_forward_pre_hook(_BeforeForward(call), prepend=True)


class _BeforeForward:
    """On a module of the trainer's, who may copy it, pickle it or compile it."""

    def __init__(self, call: Any = None) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call()

    def __deepcopy__(self, memo: Any) -> "_BeforeForward":
        return _BeforeForward()

    def __reduce__(self) -> tuple[type["_BeforeForward"], tuple[()]]:
        return _BeforeForward, ()


# --- process groups that torch did not make ---


def make_default(group: Any) -> None:
    """`group`, which torch knows, takes the place of the default group. Ending that ends this one as well."""
    _c10d._update_default_pg(group)


def before_pickling(call: Any) -> None:
    """``call()`` before torch pickles something for a collective of Python objects, from here on."""

    def to_tensor(*args: Any, **kwargs: Any) -> Any:
        call()
        return _object_to_tensor(*args, **kwargs)

    _c10d._object_to_tensor = to_tensor


_object_to_tensor: Any = _c10d._object_to_tensor


def reduction_name(op: Any) -> str:
    """The name of a reduction; None is a sum."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    reductions = _backends.ReduceOp
    return next(
        (n for n in names if op is not None and op == getattr(reductions, n)),
        "SUM" if op is None else str(op),
    )


def give_placeholder(group: Any, name: str, backend: "Backend") -> None:
    """A Python group cannot have a name without a torch backend, and DDP looks for one of the group's kind."""
    kind = getattr(
        _c10d.ProcessGroup.BackendType, backend.name.upper(), _c10d.ProcessGroup.BackendType.CUSTOM
    )
    group._register_backend(backend.device, kind, backend.placeholder())
    group._set_default_backend(kind)
    group._set_group_name(name)
    group._set_group_desc(name)


def register_group(group: Any, name: str, ranks: tuple[int, ...], backend: "Backend") -> None:
    """Tells torch of a group that it did not make; ending the default group makes torch forget it."""
    world = _c10d._world
    world.pg_map[group] = (backend.name, _backends.HashStore())
    world.pg_names[group] = _c10d.GroupName(name)
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = f"{backend.device.type}:{backend.name}"
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    _backends._register_process_group(_c10d.GroupName(name), group)
