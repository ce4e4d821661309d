"""`detect`: which profile describes a device.

Asked in this order: the variable TILEWRIGHT_DEVICE; the device's own torch module (torch.npu ...);
marks that a vendor's torch carries (Hygon's is also a HIP torch); the gfx name under HIP; the
device's name; Triton's active driver. The profiles' `match` tables hold the answers. Never a
subprocess, and never a capability number alone: PPU and MetaX cards report the numbers of CUDA
cards, so a number only tells apart cards whose name says NVIDIA.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from tilewright import environment
from tilewright.errors import DeviceError, ProfileError
from tilewright.vendors.profile import VendorProfile, load, names

VARIABLE = "TILEWRIGHT_DEVICE"
_OWN_MODULES = ("npu", "mlu", "musa", "gcu", "xpu")  # torch.<module>, also the device type
_TORCH_MARKS = ("__hcu_version__", "corex")
_NO_TRITON = ("cpu", "meta", "mps")


def detect(device: object = None) -> str:
    """Name of the profile for a `torch.device`, its string, an index, or None, the current device.

    A CPU, or a machine without torch, is "generic". So is a device that no profile describes, with
    one warning per process and kind of device.

    Raises:
        ProfileError: TILEWRIGHT_DEVICE names no profile.
        DeviceError: The device does not exist here.
    """
    forced = environment.read(VARIABLE)
    if forced:
        try:
            return load(forced).name
        except ProfileError as error:
            raise ProfileError(f"{VARIABLE}: {error}") from None
    try:
        import torch
    except ImportError:
        return "generic"
    kind, index = _place(torch, device)
    return "generic" if kind in _NO_TRITON else _probe(kind, index)


def _place(torch: Any, device: object) -> tuple[str, int]:
    """Type and index of a device, the current one's where it leaves them open."""
    kind: Any = getattr(device, "type", None)
    index: Any = getattr(device, "index", None)
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        index = int(number) if number.isdigit() else None
        kind = None if colon and index is None else kind
    elif device is None or isinstance(device, int):
        kind = next(filter(functools.partial(_available, torch), (*_OWN_MODULES, "cuda")), "cpu")
        index = device
    if kind in _NO_TRITON:
        return kind, 0
    if index is None:
        if not (isinstance(kind, str) and _available(torch, kind)):
            raise _absent(device)
        index = getattr(torch, kind).current_device()
    return kind, index


def _available(torch: Any, kind: str) -> bool:
    check = getattr(getattr(torch, kind, None), "is_available", None)
    return check is not None and check()


def _absent(device: object) -> DeviceError:
    cure = f"{VARIABLE} can name the profile of one"
    return DeviceError(f"detect: there is no device {device} here; {cure}")


@functools.cache
def _probe(kind: str, index: int) -> str:
    import torch

    if not _available(torch, kind) or index >= getattr(torch, kind).device_count():
        raise _absent(f"{kind}:{index}")
    seen, profile = _identify(torch, kind, index)
    if profile is None:
        _warn_once(seen)
        return "generic"
    return profile.name


def _identify(torch: Any, kind: str, index: int) -> tuple[str, VendorProfile | None]:
    """What was seen of the device, and the profile that this points to."""
    if kind != "cuda":
        return f"torch.{kind}", _only(lambda profile: profile.match.get("torch_attr") == kind)
    mark = next((mark for mark in _TORCH_MARKS if hasattr(torch, mark)), None)
    if mark:
        return f"torch.{mark}", _only(lambda profile: profile.match.get("torch_attr") == mark)
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return arch, _only(lambda profile: arch in profile.match.get("gcn_arch", ()))
    capability = (properties.major, properties.minor)
    seen = f"{properties.name}, compute capability {capability[0]}.{capability[1]}"
    return seen, _by_name(properties.name, capability) or _by_driver()


def _by_name(name: str, capability: tuple[int, int]) -> VendorProfile | None:
    """The profile with the longest part of the name: "NVIDIA H200" goes before "NVIDIA"."""
    found = [
        (len(part), profile)
        for profile in map(load, names())
        for part in profile.match.get("name_contains", ())
        if part.lower() in name.lower() and profile.match.get("cc", capability) == capability
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _by_driver() -> VendorProfile | None:
    """By Triton's backend, if one profile alone has it ("maca"); "cuda" tells no vendor."""
    try:
        from triton.runtime import driver

        backend = driver.active.get_current_target().backend
    except (ImportError, AttributeError, RuntimeError):
        return None
    return _only(lambda profile: profile.triton_backend == backend)


def _only(matches: Callable[[VendorProfile], bool]) -> VendorProfile | None:
    found = [profile for profile in map(load, names()) if matches(profile)]
    return found[0] if len(found) == 1 else None


@functools.cache
def _warn_once(seen: str) -> None:
    warnings.warn(
        f"no vendor profile describes {seen}; using generic, the most careful one. {VARIABLE} can "
        f"name another: {', '.join(names())}",
        RuntimeWarning,
        stacklevel=4,
    )
