"""State dicts as named tensors plus JSON, so that a checkpoint carries no pickled values.

`split` takes any nesting of dicts, lists, tuples, numbers, strings, None and tensors apart; `join` puts it
together again. Floats survive bit for bit (JSON carries their shortest round-trip form); NaN and infinity too.
"""

from typing import Any

import torch

from swift.errors import UsageError


def split(state: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], Any]:
    """(tensors by path, JSON value) of a state dict. Raises UsageError for a value that is neither."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _split(state, prefix or "state", tensors)


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise UsageError(f"the state holds two tensors that are both called {path}; rename one")
        tensors[path] = value
        return {
            "tensor": path,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[_key(k, path), _split(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_split(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise UsageError(
        f"the state at {path} holds a {type(value).__name__}; "
        "keep state_dict() to tensors, numbers, strings, lists, tuples and dicts"
    )


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise UsageError(f"the state at {path} has a key of type {type(key).__name__}; use str or int")


def join(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state dict that `split` took apart."""
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    if "dict" in skeleton:
        return {key: join(value, tensors) for key, value in skeleton["dict"]}
    kind, items = next(iter(skeleton.items()))
    values = [join(item, tensors) for item in items]
    return tuple(values) if kind == "tuple" else values


def empty_tensors(skeleton: Any) -> dict[str, torch.Tensor]:
    """Uninitialised tensors for every tensor that the skeleton names."""
    found: dict[str, torch.Tensor] = {}

    def walk(value: Any) -> None:
        if not isinstance(value, dict):
            return
        if "tensor" in value:
            found[value["tensor"]] = torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]))
        elif "dict" in value:
            for _, item in value["dict"]:
                walk(item)
        else:
            for item in next(iter(value.values())):
                walk(item)

    walk(skeleton)
    return found
