"""The kernels of the routing operators, compiled for devices that are not there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled import LANES, Binary, Launched, compiled, launched, module_of

from tilewright import handwritten, ops, vendors
from tilewright.launch import OPERATORS

TARGETS = ("sm_80", "sm_90", "gfx942")
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
ALIGN, SUM, COPY = (operator.__name__ for operator in (ops.moe_align_block_size, ops.moe_sum, ops.strided_copy))
LEAST_SCRATCH = 32768  # bytes of on-chip memory that every device has


@functools.cache
def module(operator: str, profile: str) -> Any:
    source = functools.partial(handwritten.source, operator) if operator == ALIGN else OPERATORS[operator].source
    return module_of(source(profile), f"{operator}_{profile.replace('-', '_')}")


def row(binary: Binary, title: str) -> str:
    widths = ", ".join(f"{name} {sizes}" for name, sizes in binary.widths.items() if len(sizes) < 9)
    use = f"{binary.resources['registers']:>3} registers {binary.shared:>5} bytes shared"
    return f"{title} {binary.target:<6} {use}  {widths if len(widths) < 120 else ''}".rstrip()


# moe_align_block_size

# tokens, top_k, experts, block, whether experts are mapped
PROBLEMS = (
    (16, 8, 256, 64, False),
    (2048, 8, 256, 64, False),
    (100, 10, 1024, 128, True),
    (20000, 10, 1024, 128, True),
    (300, 6, 3, 16, True),
    (16, 6, 3, 1, False),
)


def align_launches(problem: tuple[int, int, int, int, bool], profile: str, rows: bool = False) -> list[Launched]:
    tokens, top_k, experts, block, mapped = problem
    made = module(ALIGN, profile)
    ids = torch.zeros((tokens, top_k), dtype=torch.int64 if mapped else torch.int32)
    expert_map = torch.zeros(experts, dtype=torch.int32) if mapped else None
    if rows:
        return launched(made, lambda: made.expert_rows(ids, experts, expert_map))
    return launched(made, lambda: made.moe_align_block_size(ids, block, experts, expert_map, False, False, True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [False, True], ids=["align", "rows"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_align_compiles(
    problem: tuple[int, int, int, int, bool], rows: bool, target: str,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """One launch up to 1024 ids, else three; no spill, and on-chip memory that every device has."""
    launches = align_launches(problem, "generic" if LANES[target] == 32 else "metax-c550", rows)
    names = [launch.kernel.__name__ for launch in launches]
    many = ["moe_align_count_kernel", "moe_align_scan_kernel", "moe_align_place_kernel"]
    assert names == (["moe_align_few_kernel"] if problem[0] * problem[1] <= 1024 else many)
    for launch in launches:
        binary = compiled(launch, target)
        record_property("row", row(binary, f"{launch.kernel.__name__} {problem} {'rows' if rows else 'align'}"))
        assert binary.code.startswith(b"\x7fELF")
        assert launch.keywords["enable_fp_fusion"] is True and launch.keywords["num_warps"] == 8
        assert binary.resources["spilled"] == 0
        assert binary.shared <= LEAST_SCRATCH
        assert not any("atom" in line for line in global_atomics(binary))


def global_atomics(binary: Binary) -> list[str]:
    """Instructions that update global memory: none, as their order could be seen."""
    marks = ("atom.global", "red.global") if binary.is_nvidia else ("global_atomic", "buffer_atomic", "flat_atomic")
    return [line for line in binary.text.splitlines() if any(mark in line for mark in marks)]


@pytest.mark.parametrize("target", TARGETS)
def test_align_has_no_global_atomics(target: str) -> None:
    for problem in PROBLEMS[:2]:
        for launch in align_launches(problem, "generic"):
            assert global_atomics(compiled(launch, target)) == []


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    """Kernels know a problem by its experts, slots, block and layout; ids and sizes of tables are numbers."""
    keys = []
    for tokens in (200, 201, 256, 777, 1000):
        for launch in align_launches((tokens, 8, 256, 64, False), "generic"):
            constant = {k: v for k, v in launch.keywords.items() if k.isupper() or k in ("top_k", "num_experts")}
            keys.append((launch.kernel.__name__, tuple(sorted(constant.items()))))
            free = {k for k, v in launch.keywords.items() if isinstance(v, int) and k.islower()}
            free -= {"top_k", "num_experts", "num_warps", "enable_fp_fusion"}
            assert free <= set(launch.kernel.do_not_specialize)
    assert len(set(keys)) == 3


# moe_sum and the copy


def configs(operator: str, profile: str) -> Iterator[tuple[int, dict[str, int]]]:
    for number, rule in enumerate(OPERATORS[operator].kernel.rules(profile).rules):
        yield number, dict(rule.config)


def variants(operator: str) -> Iterator[Any]:
    for profile in SHIPPED:
        for number, config in configs(operator, profile):
            for target in TARGETS:
                yield pytest.param(profile, config, target, id=f"{profile}-rule{number}-{target}")


def only(operator: str, profile: str, *arguments: Any, config: dict[str, int] | None = None) -> Launched:
    made = module(operator, profile)
    return launched(made, lambda: getattr(made, operator)(*arguments, config=config))[0]


def check(binary: Binary, profile: str) -> None:
    assert binary.code.startswith(b"\x7fELF")
    assert binary.resources["spilled"] == 0
    scratch = vendors.load(profile).scratch_bytes or LEAST_SCRATCH
    assert binary.shared <= scratch


@pytest.mark.parametrize(("profile", "config", "target"), list(variants(SUM)))
def test_sum_compiles(
    profile: str, config: dict[str, int], target: str, record_property: Callable[[str, object], None]
) -> None:
    lanes = config["num_warps"] * LANES[target]
    for top_k, columns in ((8, 2048), (6, 2048), (8, 2064)):
        x = torch.zeros((3, top_k, columns), dtype=torch.bfloat16)
        launch = only(SUM, profile, x, x[:, 0].contiguous(), config=config)
        binary = compiled(launch, target)
        record_property("row", row(binary, f"moe_sum {profile:<12} {top_k}x{columns} {config['columns']}"))
        check(binary, profile)
        assert launch.kernel.__name__.endswith("_masked") == (columns % config["columns"] > 0)
        least = min(16, max(2, 2 * config["columns"] // lanes))
        name = "sum_slots" + ("_padded" if top_k == 6 else "") + ("_masked" if columns == 2064 else "")
        assert min(binary.widths[f"{name} load x"]) >= least
        assert min(binary.widths[f"{name} store out"]) >= least


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("profile", SHIPPED)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("turned", [True, False], ids=["turned", "straight"])
def test_copy_compiles(
    turned: bool, dtype: torch.dtype, profile: str, target: str, record_property: Callable[[str, object], None]
) -> None:
    """[E, N, K] to [E, K, N]: both the load and the store are as wide as a lane's share of the tile lets them be."""
    made, size = module(COPY, profile), dtype.itemsize
    for n, k in ((2048, 1024), (2064, 1040), (256, 1024)):
        x = torch.zeros((2, n, k), dtype=dtype)
        source = x.transpose(1, 2) if turned else x
        out = torch.empty(source.shape, dtype=dtype)
        launch = only(COPY, profile, source[None, None], out[None, None])
        binary, config = compiled(launch, target), made.last_launch[1]
        title = f"strided_copy {profile:<12} {config['rows']}x{config['columns']} {'turned' if turned else 'straight'}"
        record_property("row", row(binary, f"{title} {n}x{k} {size}"))
        check(binary, profile)
        masked = source.shape[1] % config["rows"] > 0 or source.shape[2] % config["columns"] > 0
        assert launch.kernel.__name__.endswith("_masked") == masked
        name, lanes = "copy" + ("_masked" if masked else ""), config["num_warps"] * LANES[target]
        share = config["rows"] * config["columns"] * size // lanes
        along = {"load": config["rows"] if turned else config["columns"], "store": config["columns"]}
        for kind, what in (("load", "x"), ("store", "out")):
            widest = min(16, max(size, share), along[kind] * size)
            assert min(binary.widths[f"{name} {kind} {what}"]) == widest
        if turned:
            assert binary.shared > 0  # the tile turns on chip
