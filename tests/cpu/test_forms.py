"""The forms that lowerings choose: grids, parts of tiles, exact tails, index widths; every operator and profile."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import deepseek_v4 as base
import deepseek_v4_siblings as siblings
import pytest
import qk_norm_rope
import torch
from deepseek_v4 import Case

import tilewright
from tilewright import grid, interpret, ops, vendors
from tilewright.errors import GenerationError
from tilewright.kernel import forced
from tilewright.launch import OPERATORS
from tilewright.module import module_text
from tilewright.tails import adapted
from tilewright.vendors.lowering import LOWERING

A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"
ALL = vendors.names()
SIBLINGS = [*siblings.cases(), (siblings.GATHER, "packed"), (siblings.GATHER, "mx")]
EXACT = [name for name in ALL if vendors.load(name).lowering["tail"] == "exact"]
NARROW = [name for name in ALL if vendors.load(name).lowering["index_width"] == "i32"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with interpret.poison():
        yield


def function(name: str) -> Any:
    return getattr(ops, name)


def on(profile: str, case: siblings.Case) -> siblings.Case:
    return siblings.profile_case(case, vendors.load(profile).lowering["e4m3_format"] == "fnuz")


def run_sibling(name: str, cache: str, profile: str, problem: Case) -> None:
    """An operator around A, checked in full; the gather on what an insert has stored."""
    gathers = name == siblings.GATHER
    operator = siblings.PADDED if gathers or name == siblings.PADDED else name
    padded = (0 if gathers else problem.heads + 3) if operator == siblings.PADDED else None
    inputs = siblings.make(on(profile, siblings.Case(operator, problem, cache, padded=padded)))
    if not gathers:
        siblings.run(inputs, profile=profile)
        return
    inputs.call(profile=profile)
    slots = torch.cat([inputs.made.slot_mapping, torch.tensor([-1])])
    siblings.check_gathered(inputs, slots, profile=profile)


# Every operator on every profile


@pytest.mark.parametrize("profile", ALL)
@pytest.mark.parametrize("tokens", [12, 17])
@pytest.mark.parametrize(("name", "cache"), SIBLINGS, ids="-".join)
def test_siblings_on_every_profile(name: str, cache: str, tokens: int, profile: str) -> None:
    run_sibling(name, cache, profile, Case(tokens, 4, 16, slots="skipping"))
    launch = tilewright.last_launch()
    assert (launch.operator, launch.profile) == (name, profile)


@pytest.mark.parametrize("profile", ALL)
def test_every_operator_has_a_text_for_every_profile(profile: str) -> None:
    """The forms that a profile names are those of the text, and the text says so."""
    lowering = vendors.load(profile).lowering
    for name, operator in OPERATORS.items():
        source = operator.source(profile)
        kernels = source[: source.index("\nRULES = (")]
        assert ("for pid in range(tl.program_id(0), programs" in kernels) == (lowering["grid"] == "persistent")
        assert ("+ first_program" in kernels) == (lowering["grid"] == "chunked")
        has_parts = lowering["subtile"] == "inner_loop" and lowering["grid"] != "persistent"
        assert ("first_part = " in kernels) == has_parts
        separate = lowering["branch"] == "separate" and len(operator.kernel.branches) > 1
        assert (f"def {name}_kernel_{operator.kernel.branches[0].name}(" in kernels) == separate
        assert ("tl.int64" in kernels) == (lowering["index_width"] == "i64")
        assert ("tl.pointer_type" in kernels) <= (lowering["ptr_recast"] == "in_kernel")
        assert ("def " + name + "_kernel_masked" in kernels) <= (lowering["tail"] == "mask")
        assert "float64" not in source and "libdevice" not in source


def test_generic_states_no_lowering_and_takes_the_careful_ones() -> None:
    assert vendors.load("generic").lowering == {name: axis.default for name, axis in LOWERING.items()}


# All combinations of forms

FORMS = {
    "grid": ("direct", "chunked", "persistent"), "subtile": ("none", "inner_loop"), "tail": ("mask", "exact"),
    "branch": ("positive_if", "separate"), "index_width": ("i32", "i64"),
}  # fmt: skip


def made_up(limit: int = 5, scratch: int = 24576, **lowering: str) -> vendors.VendorProfile:
    """generic with other forms, launches of at most `limit` programs, and room for 4 heads or rows at a time."""
    generic = vendors.load("generic")
    return dataclasses.replace(
        generic, lowering={**generic.lowering, **lowering}, grid_limit=(limit, 1, 1), scratch_bytes=scratch,
        resident_programs="sm",
    )  # fmt: skip


def module_on(profile: vendors.VendorProfile, name: str, **config: int) -> Any:
    operator = OPERATORS[name]
    rules = forced({**config, "num_warps": 1, "num_stages": 1})
    return interpret.load(module_text(operator.kernel, operator.public, profile, rules), "made_up", "<made up>")


def programs_of(profile: vendors.VendorProfile, tokens: int, heads: int, inserted: int) -> list[int]:
    """How many programs each launch should have, of tiles of 1 token by 8 heads and of 8 rows."""
    lowering = profile.lowering
    tile = {"rows": 8, "heads": 8}
    if lowering["tail"] == "exact":
        for kind, size in (("rows", inserted), ("heads", heads)):
            while size % tile[kind]:
                tile[kind] //= 2
    parts = dict.fromkeys(tile, 1)
    if lowering["subtile"] == "inner_loop":
        parts = {kind: max(1, tile[kind] // 4) for kind in tile}
        tile = {kind: min(tile[kind], 4) for kind in tile}
    kinds = [(-(-inserted // tile["rows"]), parts["rows"]), (tokens * -(-heads // tile["heads"]), parts["heads"])]
    if lowering["branch"] == "positive_if":
        kinds = [(sum(count for count, _ in kinds), max(size for _, size in kinds))]
    launches: list[int] = []
    for count, size in kinds:
        if lowering["grid"] == "persistent":
            launches.append(min(count, grid.INTERPRETED, 5))
            continue
        groups = -(-count // size)
        whole = [groups] if lowering["grid"] == "direct" else [min(5, groups - at) for at in range(0, groups, 5)]
        launches += whole
    return launches


@pytest.mark.parametrize("forms", list(itertools.product(*FORMS.values())), ids="-".join)
def test_forms_together(forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right results from every combination, and as many launches and programs as it should take."""
    profile = made_up(**dict(zip(FORMS, forms, strict=True)))
    module = module_on(profile, A, tokens=1, heads=8, kv_tokens=8)
    launched: list[int] = []
    for name, kernel in list(vars(module).items()):
        if name.startswith(f"{A}_kernel"):
            run = kernel.run
            monkeypatch.setattr(
                kernel, "run", lambda *a, run=run, grid, **k: (launched.append(grid[0]), run(*a, grid=grid, **k))
            )
    base.run(getattr(module, A), base.make(Case(9, 12, 16, slots="skipping", inserted=8)))
    assert launched == programs_of(profile, 9, 12, 8)


@pytest.mark.parametrize("tail", ["mask", "exact"])
@pytest.mark.parametrize("form", FORMS["grid"])
def test_forms_of_heads_that_do_not_divide(form: str, tail: str) -> None:
    module = module_on(made_up(grid=form, subtile="inner_loop", tail=tail), B, tokens=4, heads=4)
    for heads in ((8, 4, 2), (3, 1, 2)):
        case = qk_norm_rope.Case(7, heads, 80, 36, max_position=300)
        qk_norm_rope.run(getattr(module, B), qk_norm_rope.make(case))


# Exact tails: no lane's address leaves its tensor


def tight(inputs: Any) -> list[Any]:
    """A call's arguments in storages of their own, the first row without a slot and at position 0."""
    inputs.slot_mapping[0], inputs.position_ids[0] = -1, 0
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in inputs.arguments()]


@pytest.mark.parametrize("profile", EXACT)
def test_exact_addresses_stay_inside(profile: str) -> None:
    for case in (Case(17, 3, 16, inserted=12, slots="skipping"), Case(8, 64, 16)):
        inputs = base.make(case)
        expected = tight(inputs)
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in expected]
        function(A)(*expected, profile="generic")
        with interpret.every_lane():
            function(A)(*given, profile=profile)
        for ours, theirs in zip(given, expected, strict=True):
            assert not isinstance(ours, torch.Tensor) or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    with interpret.every_lane():
        for name, cache in SIBLINGS:
            run_sibling(name, cache, profile, Case(17, 3, 16, slots="skipping"))
        for case in (qk_norm_rope.Case(17, (3, 1, 2), 80, 36, max_position=40), qk_norm_rope.Case(8, (16, 8, 8), 128)):
            qk_norm_rope.run(function(B), qk_norm_rope.make(case), profile=profile)


@pytest.mark.parametrize("profile", [*EXACT, "cambricon-mlu590"])
@pytest.mark.parametrize("flags", list(itertools.product((True, False), repeat=3)), ids=str)
def test_flags_of_the_padded_contract(flags: tuple[bool, bool, bool], profile: str) -> None:
    """Norm, rotation and interleaved heads, each a text of its own; a condition may be about a head and a lane."""
    lanes = interpret.every_lane if profile in EXACT else contextlib.nullcontext
    for heads, padded in ((4, 8), (3, 3)):
        problem = Case(5, heads, 16, slots="skipping")
        case = siblings.Case(siblings.PADDED, problem, "packed", padded, *flags)
        inputs = siblings.make(on(profile, case))
        inputs.made.position_ids[::2] = 0  # the table's first row: before it lies nothing
        with lanes():
            siblings.run(inputs, profile=profile)


def test_masked_addresses_do_not() -> None:
    """What the test above looks for is there to be found: the masked tails of other profiles."""
    given = tight(base.make(Case(17, 3, 16, slots="skipping")))
    with interpret.every_lane(), pytest.raises(IndexError, match="with a masked lane, "):
        function(A)(*given, profile="generic")


def test_exact_tiles_shrink_until_they_divide() -> None:
    for tokens, heads, inserted, tiles in ((6, 12, 6, (4, 2)), (7, 5, 4, (1, 4)), (64, 64, 32, (32, 16))):
        inputs = base.make(Case(tokens, heads, 16, inserted=inserted))
        base.run(function(A), inputs, profile="ascend-910b")
        config = tilewright.last_launch().config
        assert (config["heads"], config["kv_tokens"]) == tiles


def test_exact_shrinks_what_the_caller_forces_too() -> None:
    config = {"tokens": 8, "heads": 8, "kv_tokens": 8, "num_warps": 1, "num_stages": 1}
    base.run(function(A), base.make(Case(6, 12, 16)), profile="ascend-910b", config=config)
    assert dict(tilewright.last_launch().config) == {**config, "tokens": 2, "heads": 4, "kv_tokens": 2}


def test_an_exact_tile_that_cuts_nothing_known_is_refused() -> None:
    kernel = OPERATORS[A].kernel
    odd = dataclasses.replace(kernel.branches[1], arrange=lambda tokens, heads: kernel.branches[1].arrange(1, heads))
    with pytest.raises(GenerationError) as caught:
        adapted(dataclasses.replace(kernel, branches=(kernel.branches[0], odd)), {"tail": "exact"})
    assert str(caught.value) == f"{A}: nothing tells which sizes the tile tokens must divide"


# Parts of tiles


def test_parts_fit_on_chip() -> None:
    """A third of the memory, halved where the compiler doubles its buffers, for one float32 copy."""
    kernel = OPERATORS[A].kernel
    for profile, limit in (("ascend-910b", 16), ("cambricon-mlu590", 85)):
        budget = grid.Grid.of(vendors.load(profile)).budget
        assert [grid.part_limit(kernel, branch, budget) for branch in kernel.branches] == [limit, limit]
    assert grid.Grid.of(vendors.load("nvidia-h200")).budget is None
    assert [grid.part_limit(kernel, branch, 1) for branch in kernel.branches] == [1, 1]


@pytest.mark.parametrize(
    ("limit", "tiles", "expected"),
    [
        (16, (1, 32), (2, 1, 16)),
        (16, (8, 8), (4, 2, 8)),
        (3, (4, 4), (8, 1, 2)),
        (64, (2, 4), (1, 2, 4)),
        (1, (1,), (1, 1)),
    ],
)
def test_tiles_in_parts(limit: int, tiles: tuple[int, ...], expected: tuple[int, ...]) -> None:
    module = module_on(made_up(subtile="inner_loop"), A, tokens=1, heads=8, kv_tokens=8)
    assert module._in_parts(limit, *tiles) == expected


# Index width


@pytest.mark.parametrize("profile", NARROW)
def test_offsets_past_32_bits_are_64_bits_wide(profile: str) -> None:
    base.run(function(A), base.make(Case(17, 1, 16)), profile=profile)
    assert tilewright.last_launch().lowerings["index_width"] == "i32"
    base.run_far(function(A), base.make(Case(17, 1, 16)), profile=profile)
    assert tilewright.last_launch().lowerings["index_width"] == "i64"
    case = qk_norm_rope.Case(3, (16, 8, 8), max_position=300)
    qk_norm_rope.run_far(function(B), qk_norm_rope.make(case), profile=profile)
    assert tilewright.last_launch().lowerings["index_width"] == "i64"


def test_the_bound_is_that_of_the_offsets() -> None:
    module = module_on(made_up(index_width="i32"), A, tokens=1, heads=8, kv_tokens=8)
    for shape, strides, fits in (
        ((2**31 - 1,), (1,), True),
        ((2**31,), (1,), False),
        ((2, 1), (2**30 - 1, 1), True),
        ((2, 1), (2**30, 1), False),
    ):
        assert module._within_int32(torch.empty(0), torch.empty(0, device="meta").as_strided(shape, strides)) == fits
    assert module._within_int32(None)


def test_a_64_bit_index_is_loaded_as_it_is() -> None:
    """Where 64 bits are asked for nothing of the choice is in the text."""
    for profile in set(ALL) - set(NARROW):
        assert not re.search(r"index_type|_within_int32", OPERATORS[A].source(profile))
