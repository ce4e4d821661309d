# mypy: ignore-errors
"""Routed rows grouped by expert and padded to whole blocks, in a stable order."""

import torch
import triton
import triton.language as tl

# `ids` of a program; `few`: up to so many take one launch; `scan` experts of a program that sums over blocks of ids.
CONFIG = {"ids": 128, "few": 1024, "scan": 4, "num_warps": 8}
CHUNK = 32  # ids that are ranked at a time; all 128 against 128 at once would spill
FILL = 1024
MOST_EXPERTS, MOST_IDS = 1024, 1 << 22
last_launch = None  # (None, configuration, kernel, flags) of the last call that launched


@triton.jit
def routed(
    topk_ids, expert_map, first, numel, token_stride, slot_stride, map_stride, num_known,
    top_k: tl.constexpr, num_experts: tl.constexpr, MAPPED: tl.constexpr, IDS: tl.constexpr,
):
    """`IDS` flat indices from `first` on, and the expert of each, -1 where none is routed."""
    index = first + tl.arange(0, IDS)
    token, slot = (index // top_k).to(tl.int64), (index % top_k).to(tl.int64)
    expert = tl.load(topk_ids + token * token_stride + slot * slot_stride, mask=index < numel, other=-1)
    expert = tl.where((expert >= 0) & (expert < num_known), expert, -1)
    if MAPPED:
        expert = tl.load(expert_map + expert.to(tl.int64) * map_stride, mask=expert >= 0, other=-1)
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1)
    return index, expert.to(tl.int32)


@triton.jit
def fill(memory, value, start, stop, FILL: tl.constexpr):
    """memory[start:stop] = value."""
    for first in range(start, stop, FILL):
        at = first + tl.arange(0, FILL)
        tl.store(memory + at, value, mask=at < stop)


@triton.jit
def name_blocks(
    expert_ids, expert_map, map_stride, expert, start, stop,
    RENAMED: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
):
    """expert_ids of an expert's blocks, rows `start` to `stop`; by its name in the map, if the map renames."""
    if RENAMED:
        if stop > start:  # an expert without rows may lie past the map
            name = tl.load(expert_map + expert.to(tl.int64) * map_stride).to(tl.int32)
            fill(expert_ids, name, start // BLOCK, stop // BLOCK, FILL)
    else:
        fill(expert_ids, expert, start // BLOCK, stop // BLOCK, FILL)


@triton.jit(do_not_specialize=["numel", "token_stride", "slot_stride", "map_stride", "num_known", "capacity"])
def moe_align_few_kernel(
    topk_ids, expert_map, sorted_ids, expert_ids, post_pad, scatter_idx, starts,
    numel, token_stride, slot_stride, map_stride, num_known, capacity,
    top_k: tl.constexpr, num_experts: tl.constexpr, MAPPED: tl.constexpr, RENAMED: tl.constexpr,
    SCATTER: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, IDS: tl.constexpr,
    FILL: tl.constexpr,
):
    """Everything in one launch: each program sees all ids and writes the rows of one expert."""
    pid = tl.program_id(0)
    index, expert = routed(
        topk_ids, expert_map, 0, numel, token_stride, slot_stride, map_stride, num_known,
        top_k, num_experts, MAPPED, IDS,
    )
    mine = expert == pid
    rank = tl.cumsum(mine.to(tl.int32), 0)
    count = tl.sum(mine.to(tl.int32), 0)
    padded = (count + BLOCK - 1) // BLOCK * BLOCK
    if BLOCK == 1:
        start = tl.sum(((expert >= 0) & (expert < pid)).to(tl.int32), 0)
        total = tl.sum((expert >= 0).to(tl.int32), 0)
    else:
        bin = tl.arange(0, BINS)
        rows = (tl.histogram(expert, BINS, mask=expert >= 0) + BLOCK - 1) // BLOCK * BLOCK
        start = tl.sum(tl.where(bin < pid, rows, 0), 0)
        total = tl.sum(rows, 0)
    place = start + rank - 1
    tl.store(sorted_ids + place, index, mask=mine)
    fill(sorted_ids, numel, start + count, start + padded, FILL)
    share = (capacity - total + num_experts - 1) // num_experts  # of what lies after the last expert's rows
    fill(sorted_ids, numel, total + pid * share, tl.minimum(total + (pid + 1) * share, capacity), FILL)
    if STARTS:
        tl.store(starts + pid, start)
        if pid == 0:
            tl.store(starts + num_experts, total)
    else:
        name_blocks(expert_ids, expert_map, map_stride, pid, start, start + padded, RENAMED, BLOCK, FILL)
        blocks, named = (capacity + BLOCK - 1) // BLOCK, total // BLOCK
        share = (blocks - named + num_experts - 1) // num_experts
        fill(expert_ids, -1, named + pid * share, tl.minimum(named + (pid + 1) * share, blocks), FILL)
        if pid == 0:
            tl.store(post_pad, total)
    if SCATTER:
        tl.store(scatter_idx + index, place, mask=mine)
        if pid == 0:
            tl.store(scatter_idx + index, -1, mask=(expert < 0) & (index < numel))


@triton.jit(do_not_specialize=["numel", "token_stride", "slot_stride", "map_stride", "num_known", "capacity", "share"])
def moe_align_count_kernel(
    topk_ids, expert_map, counts, sorted_ids, expert_ids,
    numel, token_stride, slot_stride, map_stride, num_known, capacity, share,
    top_k: tl.constexpr, num_experts: tl.constexpr, MAPPED: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr, IDS: tl.constexpr, FILL: tl.constexpr,
):
    """counts[b, e] = the ids of expert e in block b; `share` places of both tables get what no row overwrites."""
    pid = tl.program_id(0)
    _, expert = routed(
        topk_ids, expert_map, pid * IDS, numel, token_stride, slot_stride, map_stride, num_known,
        top_k, num_experts, MAPPED, IDS,
    )
    bin = tl.arange(0, BINS)
    tl.store(counts + pid * num_experts + bin, tl.histogram(expert, BINS, mask=expert >= 0), mask=bin < num_experts)
    fill(sorted_ids, numel, pid * share, tl.minimum((pid + 1) * share, capacity), FILL)
    if not STARTS:
        blocks = (capacity + BLOCK - 1) // BLOCK
        fill(expert_ids, -1, pid * share, tl.minimum((pid + 1) * share, blocks), FILL)


@triton.jit(do_not_specialize=["num_blocks"])
def moe_align_scan_kernel(
    counts, totals, num_blocks, num_experts: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):
    """counts[b, e] becomes the sum over the blocks before b, totals[e] that over all."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = counts + row[:, None] * num_experts + expert[None, :]
        inside = (row < num_blocks)[:, None] & (expert < num_experts)[None, :]
        own = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        before += tl.sum(own, 0)
    tl.store(totals + expert, before, mask=expert < num_experts)


@triton.jit(do_not_specialize=["numel", "token_stride", "slot_stride", "map_stride", "num_known", "num_blocks"])
def moe_align_place_kernel(
    topk_ids, expert_map, counts, totals, sorted_ids, expert_ids, post_pad, scatter_idx, starts,
    numel, token_stride, slot_stride, map_stride, num_known, num_blocks,
    top_k: tl.constexpr, num_experts: tl.constexpr, MAPPED: tl.constexpr, RENAMED: tl.constexpr,
    SCATTER: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, IDS: tl.constexpr,
    CHUNK: tl.constexpr, FILL: tl.constexpr,
):
    """The first `num_blocks` programs place a block of ids each; the others name the blocks of an expert each."""
    pid = tl.program_id(0)
    bin = tl.arange(0, BINS)
    rows = (tl.load(totals + bin, mask=bin < num_experts, other=0) + BLOCK - 1) // BLOCK * BLOCK
    start = tl.cumsum(rows, 0) - rows
    if pid < num_blocks:
        all_index, all_expert = routed(
            topk_ids, expert_map, pid * IDS, numel, token_stride, slot_stride, map_stride, num_known,
            top_k, num_experts, MAPPED, IDS,
        )
        for chunk in tl.static_range(IDS // CHUNK):
            index, expert = routed(
                topk_ids, expert_map, pid * IDS + chunk * CHUNK, numel, token_stride, slot_stride, map_stride,
                num_known, top_k, num_experts, MAPPED, CHUNK,
            )
            earlier = (expert[:, None] == all_expert[None, :]) & (all_index[None, :] < index[:, None])
            rank = tl.sum(earlier.to(tl.int32), 1)
            is_routed, bounded = expert >= 0, tl.maximum(expert, 0)
            before = tl.load(counts + pid * num_experts + bounded, mask=is_routed, other=0)
            place = tl.gather(start, bounded, 0) + before + rank
            tl.store(sorted_ids + place, index, mask=is_routed)
            if SCATTER:
                tl.store(scatter_idx + index, tl.where(is_routed, place, -1), mask=index < numel)
    else:
        owner = pid - num_blocks
        first = tl.sum(tl.where(bin < owner, rows, 0), 0)
        if STARTS:
            tl.store(starts + owner, first)
        else:
            stop = first + tl.sum(tl.where(bin == owner, rows, 0), 0)
            name_blocks(expert_ids, expert_map, map_stride, owner, first, stop, RENAMED, BLOCK, FILL)
        if owner == 0:
            if STARTS:
                tl.store(starts + num_experts, tl.sum(rows, 0))
            else:
                tl.store(post_pad, tl.sum(rows, 0))


class ContractError(ValueError):
    """A call breaks the operator's contract in several ways; the message lists all of them."""


class ShapeError(ContractError):
    """Every problem of the call is one of sizes."""


class DtypeError(ContractError):
    """Every problem of the call is one of dtypes."""


class LayoutError(ContractError):
    """Every problem of the call is one of strides or contiguity."""


class DeviceError(ContractError):
    """Every problem of the call is one of devices."""


def moe_align_block_size(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False,
    return_scatter_idx=False, *, config=None,
):
    """(sorted_token_ids, expert_ids, num_tokens_post_pad[, scatter_idx]), int32: vLLM's tables, in a stable order."""
    flags = {
        "pad_sorted_ids": pad_sorted_ids, "ignore_invalid_experts": ignore_invalid_experts,
        "return_scatter_idx": return_scatter_idx,
    }
    _check("moe_align_block_size", topk_ids, block_size, num_experts, expert_map, flags)
    numel = topk_ids.numel()
    capacity = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        capacity = -(-capacity // block_size) * block_size
    if numel < num_experts:
        capacity = min(numel * block_size, capacity)
    device = topk_ids.device
    if numel == 0:
        sizes = (0, 0, 1, 0) if return_scatter_idx else (0, 0, 1)
        return tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
    sorted_ids = torch.empty(capacity, dtype=torch.int32, device=device)
    expert_ids = torch.empty(-(-capacity // block_size), dtype=torch.int32, device=device)
    post_pad = torch.empty(1, dtype=torch.int32, device=device)
    scatter_idx = torch.empty(numel, dtype=torch.int32, device=device) if return_scatter_idx else None
    outputs = {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "post_pad": post_pad, "scatter_idx": scatter_idx}
    known = num_experts if expert_map is None else min(num_experts, expert_map.shape[0])
    _launch(topk_ids, expert_map, known, num_experts, block_size, ignore_invalid_experts, outputs, config)
    tables = (sorted_ids, expert_ids, post_pad)
    return tables if scatter_idx is None else (*tables, scatter_idx)


def expert_rows(topk_ids, num_experts, expert_map=None, *, config=None):
    """(rows [ids], starts [num_experts + 1]), int32: expert e has the flat indices rows[starts[e]:starts[e + 1]].

    Without padding, in a stable order; what lies after the last expert's rows is the number of ids. The map, if there
    is one, names the experts.
    """
    _check("expert_rows", topk_ids, 1, num_experts, expert_map, {})
    numel, device = topk_ids.numel(), topk_ids.device
    rows = torch.empty(numel, dtype=torch.int32, device=device)
    if numel == 0:
        return rows, torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    known = num_experts if expert_map is None else expert_map.shape[0]
    _launch(topk_ids, expert_map, known, num_experts, 1, True, {"sorted_ids": rows, "starts": starts}, config)
    return rows, starts


def _launch(topk_ids, expert_map, num_known, num_experts, block_size, map_first, outputs, config):
    """On the device of topk_ids, whatever the current one is; ids from `num_known` on are not routed."""
    device, config = topk_ids.device, _checked(config or {})
    arguments = (topk_ids, expert_map, num_known, num_experts, block_size, map_first, outputs, config)
    if device.type == "cpu" or device.index == torch.get_device_module(device).current_device():
        _launch_here(*arguments)
    else:
        with torch.get_device_module(device).device(device):
            _launch_here(*arguments)


def _launch_here(topk_ids, expert_map, num_known, num_experts, block_size, map_first, outputs, config):
    global last_launch
    numel, device = topk_ids.numel(), topk_ids.device
    sorted_ids, starts, scatter_idx = outputs["sorted_ids"], outputs.get("starts"), outputs.get("scatter_idx")
    capacity = sorted_ids.numel()
    mapped = expert_map is not None
    ids = {
        "topk_ids": topk_ids, "expert_map": expert_map if mapped else topk_ids, "numel": numel,
        "token_stride": topk_ids.stride(0), "slot_stride": topk_ids.stride(1),
        "map_stride": expert_map.stride(0) if mapped else 1, "top_k": topk_ids.shape[1],
        "num_known": num_known, "num_experts": num_experts, "MAPPED": mapped and map_first, "BLOCK": block_size,
        "BINS": max(32, triton.next_power_of_2(num_experts)), "FILL": FILL, "STARTS": starts is not None,
        "num_warps": config["num_warps"], "enable_fp_fusion": True,
    }
    tables = {"sorted_ids": sorted_ids, "expert_ids": outputs.get("expert_ids", sorted_ids)}
    written = {
        **tables, "post_pad": outputs.get("post_pad", sorted_ids), "starts": sorted_ids if starts is None else starts,
        "scatter_idx": sorted_ids if scatter_idx is None else scatter_idx, "SCATTER": scatter_idx is not None,
        "RENAMED": mapped and not map_first,
    }
    few = numel <= config["few"]
    last_launch = (None, config, "moe_align_few_kernel" if few else "moe_align_place_kernel", {"mapped": mapped})
    if few:
        size = max(128, triton.next_power_of_2(numel))
        moe_align_few_kernel[(num_experts,)](**ids, **written, capacity=capacity, IDS=size)
        return
    num_blocks, scan = triton.cdiv(numel, config["ids"]), config["scan"]
    counts = torch.empty((num_blocks, num_experts), dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    ids["IDS"] = config["ids"]
    share = triton.cdiv(capacity, num_blocks)
    moe_align_count_kernel[(num_blocks,)](**ids, **tables, counts=counts, capacity=capacity, share=share)
    moe_align_scan_kernel[(triton.cdiv(num_experts, scan),)](
        counts, totals, num_blocks, num_experts, EXPERTS=scan, ROWS=64 if num_blocks <= 64 else 1024,
        num_warps=config["num_warps"], enable_fp_fusion=True,
    )
    moe_align_place_kernel[(num_blocks + num_experts,)](
        **ids, **written, counts=counts, totals=totals, num_blocks=num_blocks, CHUNK=CHUNK
    )


RANGES = {"ids": (32, 1024), "few": (0, 8192), "scan": (1, 64), "num_warps": (1, 32)}  # "few" is any number


def _checked(config):
    """CONFIG with what the caller replaces."""
    problems = [f"{name} is unknown" for name in sorted(set(config) - set(RANGES))]
    for name in RANGES:
        value, (least, most) = config.get(name, CONFIG[name]), RANGES[name]
        kind = "whole number" if name == "few" else "power of two"
        fits = type(value) is int and least <= value <= most
        if not fits or (name != "few" and value & (value - 1)):
            problems.append(f"{name} = {value!r} is no {kind} from {least} to {most}")
    if problems:
        raise ContractError("moe_align_block_size: config: " + "; ".join(problems))
    return {**CONFIG, **config}


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _check(operator, topk_ids, block_size, num_experts, expert_map, flags):
    """Raises one error that names everything wrong with a call."""
    problems = []
    tensors = {"topk_ids": (("tokens", "top_k"), topk_ids)}
    if expert_map is not None:
        tensors["expert_map"] = (("experts",), expert_map)
    for name, (axes, tensor) in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            problems.append((DtypeError, f"{name} is of type {type(tensor).__name__}, a tensor is needed"))
            continue
        if tensor.dim() != len(axes):
            text = f"{name} has rank {tensor.dim()}, {len(axes)} is needed: [{', '.join(axes)}]"
            problems.append((ShapeError, text))
        if tensor.dtype not in (torch.int32, torch.int64):
            problems.append((DtypeError, f"{name} is {_name(tensor.dtype)}, int32 or int64 is needed"))
    if all(isinstance(tensor, torch.Tensor) for _, tensor in tensors.values()):
        if expert_map is not None and expert_map.device != topk_ids.device:
            text = f"expert_map is on {expert_map.device}, topk_ids on {topk_ids.device}"
            problems.append((DeviceError, text))
    numbers = {"block_size": (block_size, 1 << 16), "num_experts": (num_experts, MOST_EXPERTS)}
    for name, (value, most) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append((DtypeError, f"{name} is of type {type(value).__name__}, an int is needed"))
        elif value < 1:
            problems.append((ShapeError, f"{name} is {value}, at least 1 is needed"))
        elif value > most:
            problems.append((ShapeError, f"{name} is {value}, at most {most} is supported"))
    for name, value in flags.items():
        if not isinstance(value, bool):
            problems.append((DtypeError, f"{name} is of type {type(value).__name__}, a bool is needed"))
    if isinstance(topk_ids, torch.Tensor) and topk_ids.numel() > MOST_IDS:
        problems.append((ShapeError, f"topk_ids has {topk_ids.numel()} ids, at most {MOST_IDS} are supported"))
    if not problems:
        return
    kinds = {kind for kind, _ in problems}
    error = kinds.pop() if len(kinds) == 1 else ContractError
    lines = [text for _, text in problems]
    width = max(map(len, tensors))
    for name, (axes, tensor) in tensors.items():
        if isinstance(tensor, torch.Tensor):
            sizes = [str(size) for size in tensor.shape]
            if len(sizes) == len(axes):
                sizes = [f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True)]
            lines.append(f"  {name.ljust(width)}  [{', '.join(sizes)}]  {_name(tensor.dtype)}  {tensor.device}")
    raise error(f"{operator}: " + "\n".join(lines))
