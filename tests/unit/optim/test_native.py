"""`kernels.cpp`: built where it can be, used where it fits, over blocks, threads and many escapes."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.optimizers import Lamb, Lion
from swift_ft.state import kernels
from swift_ft.state.exact_undo import Exact, Residue
from swift_ft.state.journal import Journal
from tests.unit.optim import models

LARGE = 5 * (1 << 15) + 77
"""Elements that several threads share, with a rest."""


def has_compiler() -> bool:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return found is not None and sys.platform == "linux"


def grown(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: int = 2, scale: float = 1.0
) -> None:
    for step in range(steps):
        models.give_gradients(parameters, step, scale)
        optimizer.step()


def residues(journal: Journal) -> list[Residue]:
    records = [record for record in journal._records.values() if isinstance(record, Exact)]
    return [residue for record in records for residue in record._residues]


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler was there at the installation")
def test_it_is_built_and_used() -> None:
    assert isinstance(kernels.library(), ctypes.CDLL), "install again: hatch_build.py says why"
    parameters = models.parameters(torch.float32)
    journal = Journal(torch.optim.AdamW(parameters), undo="exact")
    models.step_on(journal, parameters, 0)
    assert len(residues(journal)) == 1


def taken_back(optimizer: torch.optim.Optimizer, scale: float = 1.0) -> tuple[Journal, bool]:
    """After a step that is undone exactly: the journal while the step is applied, and whether all bits are back."""
    before = models.image(optimizer)
    journal = Journal(optimizer, undo="exact")
    models.give_gradients([p for group in optimizer.param_groups for p in group["params"]], 3, scale)
    journal.begin(3)
    journal.apply_rest()
    kinds = [type(record).__name__ for record in journal._records.values()]
    journal.undo()
    assert "Exact" in kinds or kinds == ["PreImage"]
    return journal, models.image(optimizer) == before


@pytest.mark.usefixtures("way")
def test_parameters_that_share_memory_are_copied() -> None:
    memory = torch.randn(4000)
    views = [torch.nn.Parameter(memory[:3000]), torch.nn.Parameter(memory[1000:])]
    for optimizer in (
        torch.optim.SGD([views[0], torch.nn.Parameter(memory[:3000])], lr=1e-6),
        torch.optim.AdamW(views),
    ):
        grown(optimizer, optimizer.param_groups[0]["params"])
        assert taken_back(optimizer)[1]


@pytest.mark.usefixtures("way")
def test_what_a_hook_has_changed_after_the_step_comes_back() -> None:
    parameters = models.parameters(torch.float32)
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def clamp(*_: Any) -> None:
        for parameter in parameters:
            parameter.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    assert taken_back(optimizer)[1]


def test_threads_that_flush_denormals_differently_compute_alike() -> None:
    # torch's setting is one of the calling thread; the others of a team do not have it.
    had = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    try:
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(2e-38 * torch.randn(1 << 17, generator=generator))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        grown(optimizer, [parameter], scale=1e-38)
        assert all(taken_back(optimizer, 1e-38)[1] for _ in range(40))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(had)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_moment_is_never_below_what_rounding_leaves_of_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5000, generator=generator).to(dtype))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    grown(optimizer, [parameter], steps=1, scale=1e-3)
    journal = Journal(optimizer, undo="arithmetic")
    models.step_on(journal, [parameter], 3)
    after = optimizer.state[parameter]["exp_avg_sq"].clone()
    journal.undo()
    least = 0.5 * torch.finfo(dtype).eps * after.float()
    assert bool((optimizer.state[parameter]["exp_avg_sq"].float() >= least).all())


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler was there at the installation")
def test_a_library_of_another_version_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.library()
    assert found is not None
    copy = tmp_path / "kernels.cpp"
    shutil.copy(found._name, tmp_path)
    copy.write_bytes(kernels.SOURCE.read_bytes())
    monkeypatch.setattr(kernels, "SOURCE", copy)
    kernels.library.cache_clear()
    try:
        assert kernels.library() is not None
        kernels.library.cache_clear()
        copy.write_bytes(copy.read_bytes() + b"// a change")
        assert kernels.library() is None
    finally:
        kernels.library.cache_clear()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ENV_OFF, "1")
    kernels.library.cache_clear()
    try:
        assert kernels.library() is None
    finally:
        kernels.library.cache_clear()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA's compiler")
@pytest.mark.parametrize("dtype", kernels.DEVICE_TYPES, ids=str)
@pytest.mark.parametrize("form", list(kernels.Form))
def test_it_compiles_for_sm_90_and_every_operation_is_ieees(
    form: kernels.Form, dtype: torch.dtype, tmp_path: Path
) -> None:
    source, assembly = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    source.write_text(kernels.device_source(form, dtype))
    nvcc = ["nvcc", "-arch=sm_90", "--fmad=false"]
    subprocess.run([*nvcc, "-ptx", str(source), "-o", str(assembly)], check=True, cwd=tmp_path)
    subprocess.run([*nvcc, "-cubin", str(assembly), "-o", "kernel.cubin"], check=True, cwd=tmp_path)
    text = assembly.read_text()
    assert ".entry swift_codes" in text
    assert not re.search(r"\b(fma|mad)\.\S*f(32|64)|\.ftz|\.approx", text)
    assert (".rn.f" in text and "sqrt.rn" in text) or form != kernels.Form.ADAM


VARIANTS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (Lamb, {}),
    (Lion, {}),
]


@pytest.mark.parametrize("grown_for", [0, 4])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(("cls", "hyper"), VARIANTS)
def test_the_inverse_leads_back(
    cls: Any, hyper: dict[str, Any], decay: float, maximize: bool, grown_for: int
) -> None:
    parameters = models.parameters(torch.float64)
    optimizer = cls(parameters, **hyper, weight_decay=decay, maximize=maximize)
    grown(optimizer, parameters, grown_for)

    def everything() -> torch.Tensor:
        state = [v for p in parameters for v in optimizer.state.get(p, {}).values() if v is not None]
        return torch.cat([t.detach().reshape(-1).double() for t in [*parameters, *state]])

    truth = everything()
    journal = Journal(optimizer, undo="arithmetic")
    models.step_on(journal, parameters, 20)
    assert not torch.equal(everything()[: truth.numel()], truth)
    assert not journal.undo().exact
    # In a first step with decay a few gradients lose their sign to it, and cannot be told from the others.
    off = (everything() - truth).abs() > 1e-9
    assert float(off.double().mean()) <= (0.02 if decay and not grown_for else 0.0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["sgd-nesterov", "adamw", "lion"])
def test_blocks_and_threads(name: str, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [LARGE, 1, 511, 512, 0, 513]
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
    optimizer = models.make(name, "default", parameters)
    had = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grown(optimizer, parameters)
        before = models.image(optimizer)
        journal = Journal(optimizer, undo="exact")
        models.step_on(journal, parameters, 7)
        assert models.image(optimizer) != before
        assert journal.undo().exact
        assert models.image(optimizer) == before
    finally:
        torch.set_num_threads(had)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_as_many_escapes_as_there_may_be(share: float) -> None:
    # A parameter that is tiny beside its step cannot be told from what rounding leaves: it escapes.
    values = torch.randn(LARGE)
    tiny = torch.rand(LARGE) < share
    values[tiny] = 1e-30 * torch.randn(int(tiny.sum()))
    parameters = [torch.nn.Parameter(values[:1000].clone()), torch.nn.Parameter(values[1000:].clone())]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    grown(optimizer, parameters, steps=1, scale=1.0)
    with torch.no_grad():  # tiny again after a step that made the state
        for parameter, start in zip(parameters, values.split([1000, LARGE - 1000]), strict=True):
            parameter.copy_(start)
    before = models.image(optimizer)
    journal = Journal(optimizer, undo="exact")
    models.step_on(journal, parameters, 5)
    (residue,) = residues(journal)
    some = residue._some.get(0)
    kept = 0 if some is None else some[0].numel()
    assert (0 in residue._whole) == (share > 0.5)
    if share == 0.3:
        assert kept > max(kernels.ROOM, LARGE // 64)  # the first room was too small
    elif share < 0.1:
        assert int(tiny.sum()) <= kept <= int(tiny.sum()) + LARGE // 50
    journal.undo()
    assert models.image(optimizer) == before
