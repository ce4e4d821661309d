"""moe_align_block_size and expert_rows: every table bit for bit, on every path, within its own memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import fingerprint
from moe import check_aligned, guarded

import tilewright
from tilewright import handwritten, interpret, ops, vendors
from tilewright.interpret import launch
from tilewright.ops import moe_reference as reference
from tilewright.ops.moe_align_block_size import expert_rows

NAME = "moe_align_block_size"
MANY, FEW = {"few": 0}, {"few": 8192}  # the path of three launches, and that of one
PATHS = {"rules": None, "many": MANY, "few": FEW}


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Mostly routed ids; a few below 0 and past the experts."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, top_k), generator=made)
    odd = torch.rand((tokens, top_k), generator=made)
    for value, share in ((-1, 0.05), (experts, 0.08), (-(2**31), 0.09), (2**31 - 1, 0.1)):
        ids[(odd < share) & (odd >= share - 0.02)] = value
    return ids.int()


def check(ids: torch.Tensor, *arguments: Any, config: Any = None, **options: Any) -> list[torch.Tensor]:
    """A call's tables, checked; its inputs are as before."""
    before = fingerprint(ids)
    with guarded():
        tables = ops.moe_align_block_size(ids, *arguments, config=config, **options)
    check_aligned(tables, ids, *arguments, **options)
    assert fingerprint(ids) == before
    return list(tables)


# tokens, top_k, experts, block_size; numbers of ids about 128 and 1024, experts about powers of two, more than ids
SHAPES = (
    (1, 1, 1, 1),
    (1, 8, 256, 64),
    (3, 2, 32, 16),
    (5, 3, 7, 4),
    (16, 8, 8, 16),
    (43, 3, 33, 128),
    (64, 2, 160, 32),
    (127, 1, 5, 3),
    (129, 1, 5, 16),
    (128, 8, 64, 16),
    (341, 3, 257, 64),
    (205, 5, 128, 128),
    (257, 4, 1024, 16),
    (1031, 2, 31, 1),
)
# Of vLLM's own grid; some of it takes minutes in the interpreter.
GRID = [
    (tokens, top_k, experts, block)
    for tokens, top_k, experts, block in itertools.product((1, 3, 256, 2256), (1, 2, 16, 32), (32, 160, 257), (32, 128))
]


def shapes() -> Iterator[Any]:
    for shape, path in itertools.product(SHAPES, PATHS):
        if path != "few" or shape[0] * shape[1] <= 2048:
            yield pytest.param(*shape, PATHS[path], id=".".join(map(str, shape)) + f"-{path}")
    for shape in GRID:
        mark = [pytest.mark.full] if shape[0] * shape[1] > 1024 else []
        yield pytest.param(*shape, None, marks=mark, id=".".join(map(str, shape)) + "-grid")


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block", "config"), list(shapes()))
def test_tables(tokens: int, top_k: int, experts: int, block: int, config: Any) -> None:
    ids = random_ids(tokens, top_k, experts)
    check(ids, block, experts, return_scatter_idx=True, config=config)


def test_many_ids() -> None:
    """20,000 ids: two rounds of a program that sums over blocks would need 131,072."""
    check(random_ids(2500, 8, 256), 64, 256, return_scatter_idx=True)


def test_sums_over_more_blocks_than_one_round_holds() -> None:
    """Blocks of 32 ids, so that 1030 of them are summed in two rounds."""
    ids = random_ids(1030 * 4, 8, 6)
    check(ids, 16, 6, config={"ids": 32, "few": 0})


CONTENTS: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "all -1": lambda tokens, top_k, experts: torch.full((tokens, top_k), -1),
    "all past": lambda tokens, top_k, experts: torch.full((tokens, top_k), experts),
    "first expert": lambda tokens, top_k, experts: torch.zeros((tokens, top_k)),
    "last expert": lambda tokens, top_k, experts: torch.full((tokens, top_k), experts - 1),
    "in turn": lambda tokens, top_k, experts: torch.arange(tokens * top_k).view(tokens, top_k) % experts,
    "backwards": lambda tokens, top_k, experts: experts - 1 - torch.arange(tokens * top_k).view(-1, top_k) % experts,
    "fault 41": lambda tokens, top_k, experts: torch.tensor([[0, 1], [-1, -1]]).repeat(tokens // 2, top_k // 2),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", CONTENTS)
def test_contents(content: str, path: str) -> None:
    for tokens, top_k, experts, block in ((2, 2, 4, 16), (40, 4, 16, 8), (2, 2, 256, 64)):
        ids = CONTENTS[content](tokens, top_k, experts).int()
        tables = check(ids, block, experts, return_scatter_idx=True, config=PATHS[path])
        if content.startswith("all"):
            assert int(tables[2]) == 0 and tables[0].unique().tolist() == [ids.numel()]


@pytest.mark.parametrize("path", PATHS)
def test_layouts_of_ids(path: str) -> None:
    """Every second column of a wider table, transposed, one row again and again, 64 bits."""
    wide = random_ids(50, 8, 12)
    for ids in (wide[:, ::2], wide[::3, 1:4], wide.T, wide[:1].expand(50, 8), wide.T[::2, :33], wide.long()):
        check(ids, 16, 12, config=PATHS[path])
    high = wide.long()
    high[::5] += 2**32  # would be another expert in 32 bits
    high[1::5] -= 2**32
    check(high, 16, 12, config=PATHS[path])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_expert_map(first: bool, pad: bool, path: str) -> None:
    """Rank 1 of 4, one shorter than the experts, longer, of 64 bits and strided, all elsewhere, and out of range."""
    experts = 16
    local = torch.arange(experts) - 4
    local = torch.where((local >= 0) & (local < 4), local, -1).int()
    strided = torch.stack((local, local + 7), dim=1).long()[:, 0]
    odd = local.clone()
    odd[0] = 2**31 - 1
    if not first:
        odd[1] = -(2**31)  # whatever the map says is the block's name
    ids = random_ids(61, 3, experts)  # so that whole blocks are more places than without `pad_sorted_ids`
    far = local.long()
    far[2] = 1 - 2**32 if first else 0
    short, long, nowhere = local[:7].clone(), torch.cat((local, local)), torch.full_like(local, -1)
    for expert_map in (local, short, long, strided, nowhere, odd, far):
        options = {"pad_sorted_ids": pad, "ignore_invalid_experts": first, "return_scatter_idx": True}
        tables = check(ids, 8, experts, expert_map, config=PATHS[path], **options)
        if first:
            routed = int(tables[2]) // 8
            assert bool((tables[1][:routed] >= 0).all()) and bool((tables[1][routed:] == -1).all())


def test_fault_44_everything_is_elsewhere() -> None:
    expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32)
    ids = torch.tensor([[5, 6], [0, 7]], dtype=torch.int32)
    tables = check(ids, 4, 8, expert_map, ignore_invalid_experts=True, return_scatter_idx=True)
    assert tables[3].tolist() == [-1, -1, 0, -1]
    assert check(ids, 4, 8, expert_map)[1].tolist() == [0, -1, -1, -1]


def test_fault_52_no_ids() -> None:
    for shape in ((0, 8), (3, 0)):
        ids = torch.zeros(shape, dtype=torch.int32)
        for options in ({}, {"return_scatter_idx": True}, {"pad_sorted_ids": True}):
            with interpret.counting() as counts:
                check(ids, 16, 8, **options)
            assert counts.programs == 0


@pytest.mark.parametrize("path", ["many", "few"])
def test_results_do_not_depend_on_the_order_of_programs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(140, 3, 37)
    forward = check(ids, 8, 37, return_scatter_idx=True, config=PATHS[path])
    product, orders = itertools.product, []

    def backwards(*ranges: range) -> Iterator[tuple[int, ...]]:
        orders.append(len(list(product(*ranges))))
        return iter(list(product(*ranges))[::-1])

    monkeypatch.setattr(launch.itertools, "product", backwards)
    backward = check(ids, 8, 37, return_scatter_idx=True, config=PATHS[path])
    assert orders == ([37] if path == "few" else [4, 10, 4 + 37])
    assert all(map(torch.equal, forward, backward))


def test_every_place_has_one_writer_a_launch() -> None:
    """The fewest bytes that fill the tables: what programs wrote twice would be more."""
    ids = random_ids(100, 2, 12)
    with interpret.counting() as counts:
        tables = check(ids, 8, 12, return_scatter_idx=True, config=FEW)
    assert counts.bytes_stored == 4 * sum(table.numel() for table in tables)


# Rows without padding


def check_rows(ids: torch.Tensor, experts: int, expert_map: Any = None, **options: Any) -> None:
    with guarded():
        rows, starts = expert_rows(ids, experts, expert_map, **options)
    known = -1 if expert_map is not None else experts
    local = reference.local_experts(ids.reshape(-1), experts, known, expert_map)
    order = torch.where(local >= 0, local, experts).sort(stable=True).indices
    counts = torch.bincount(local[local >= 0], minlength=experts)
    wanted = torch.full_like(order, ids.numel())
    wanted[: int(counts.sum())] = order[: int(counts.sum())]
    assert (rows.dtype, starts.dtype) == (torch.int32, torch.int32)
    assert rows.tolist() == wanted.tolist()
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("path", PATHS)
def test_expert_rows(path: str) -> None:
    for tokens, top_k, experts in ((1, 1, 1), (16, 8, 256), (33, 3, 7), (150, 8, 64), (0, 8, 4), (9, 2, 1024)):
        check_rows(random_ids(tokens, top_k, experts), experts, config=PATHS[path])
    expert_map = torch.tensor([-1, 3, 0, -1, 1, 2, 9], dtype=torch.int32)
    for ids in (random_ids(50, 4, 7), random_ids(50, 4, 7).long().T, torch.full((5, 2), -1)):
        check_rows(ids, 4, expert_map, config=PATHS[path])


# Devices


def test_what_ran_can_be_asked() -> None:
    for path, kernel in (("few", "moe_align_few_kernel"), ("many", "moe_align_place_kernel")):
        ops.moe_align_block_size(random_ids(9, 2, 4), 4, 4, config=PATHS[path], profile="metax-c550")
        last = tilewright.last_launch()
        assert (last.operator, last.profile, last.kernel, last.compiled) == (NAME, "metax-c550", kernel, False)
        assert last.config == {"ids": 128, "few": PATHS[path]["few"], "scan": 4, "num_warps": 8}


@pytest.mark.parametrize("profile", vendors.names())
def test_programs_fit_every_device(profile: str) -> None:
    device, module = vendors.load(profile), handwritten.module(NAME, profile, True)
    warps, most = module.CONFIG["num_warps"], device.max_threads or 256
    assert 1 <= warps <= 8 and warps & (warps - 1) == 0
    assert warps * (device.warp_size or 32) <= most
    programs = module.MOST_IDS // module.CONFIG["ids"] + module.MOST_EXPERTS
    assert programs <= (device.grid_limit or (65535, 1, 1))[0]
    text = handwritten.source(NAME, profile).split('"""Routed rows', 1)[1]
    own = handwritten.source(NAME, "nvidia-h200").split('"""Routed rows', 1)[1]
    assert text == own.replace('"num_warps": 8', f'"num_warps": {warps}')
    assert f"# profile       {device.name} {device.hash}\n" in handwritten.source(NAME, profile)
