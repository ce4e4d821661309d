"""Detection, on torch modules made up for every vendor."""

import importlib
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from deepseek_v4 import Case, make, run

from tilewright import interpret, last_launch
from tilewright.errors import DeviceError, ProfileError
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as insert
from tilewright.vendors import detect, load, names

module: Any = importlib.import_module("tilewright.vendors.detect")


class Backend:
    """torch.cuda, torch.npu ...: a module with one device a given property record."""

    def __init__(self, *devices: Any) -> None:
        self.devices = devices

    def is_available(self) -> bool:
        return bool(self.devices)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return len(self.devices)

    def get_device_properties(self, index: int) -> Any:
        return self.devices[index]


def card(name: str, major: int = 0, minor: int = 0, gcn: str = "") -> Any:
    return SimpleNamespace(name=name, major=major, minor=minor, gcnArchName=gcn)


def fake_torch(*cards: Any, hip: str | None = None, **extra: Any) -> Any:
    version = SimpleNamespace(hip=hip)
    return SimpleNamespace(
        **{"cuda": Backend(*cards), "xpu": Backend(), "version": version, **extra}
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No variable, no memory of earlier detections, no Triton driver; any warning is an error."""
    monkeypatch.delenv("TILEWRIGHT_DEVICE", raising=False)
    use_driver(monkeypatch, None)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    forget()


def forget() -> None:
    module._probe.cache_clear()
    module._warn_once.cache_clear()


def use_torch(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)


def use_driver(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            if backend is None:
                raise RuntimeError("0 active drivers")
            return SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend=backend))

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=Driver()))


H200 = card("NVIDIA H200", 9, 0)
UNKNOWN = card("NVIDIA GeForce RTX 4090", 8, 9)
MACHINES = {
    "A100": (fake_torch(card("NVIDIA A100-SXM4-80GB", 8, 0)), "nvidia-a100"),
    "H100": (fake_torch(card("NVIDIA H100 80GB HBM3", 9, 0)), "nvidia-h100"),
    "H20": (fake_torch(card("NVIDIA H20", 9, 0)), "nvidia-h100"),
    "H200": (fake_torch(H200), "nvidia-h200"),
    "B200": (fake_torch(card("NVIDIA B200", 10, 0)), "nvidia-b200"),
    "MI300X": (
        fake_torch(card("AMD Instinct MI300X", 9, 4, "gfx942:sramecc+:xnack-"), hip="7.0"),
        "amd-mi300x",
    ),
    "MI355X": (fake_torch(card("", 9, 5, "gfx950:sramecc+:xnack-"), hip="7.0"), "amd-mi355x"),
    "Hygon by torch, before AMD": (
        fake_torch(card("", 9, 4, "gfx942"), hip="5.7", __hcu_version__="3.6"),
        "hygon-bw1000",
    ),
    "Hygon gfx936": (fake_torch(card("BW", 9, 3, "gfx936:xnack-"), hip="5.7"), "hygon-bw1000"),
    "Hygon gfx938": (fake_torch(card("BW", 9, 3, "gfx938"), hip="5.7"), "hygon-bw1000"),
    "C550 with capability 8.0": (fake_torch(card("MetaX C550", 8, 0)), "metax-c550"),
    "C550 with capability 9.0": (fake_torch(card("METAX C550", 9, 0)), "metax-c550"),
    "PPU with capability 8.0": (fake_torch(card("PPU-ZW810E", 8, 0)), "thead-zw810e"),
    "PPU with capability 8.9": (fake_torch(card("PPU-ZW810E", 8, 9)), "thead-zw810e"),
    "S5000": (fake_torch(musa=Backend(card("MTT S5000", 3, 1))), "mthreads-s5000"),
    "S5000 beside a CUDA shim": (
        fake_torch(card("MTT S5000", 9, 0), musa=Backend(card("MTT S5000", 3, 1))),
        "mthreads-s5000",
    ),
    "910B": (fake_torch(npu=Backend(card("Ascend910B3"))), "ascend-910b"),
    "MLU590": (fake_torch(mlu=Backend(card("MLU590"))), "cambricon-mlu590"),
}
STRANGERS = {
    "sm_89": (fake_torch(UNKNOWN), "NVIDIA GeForce RTX 4090, compute capability 8.9"),
    "gfx1100": (fake_torch(card("", 11, 0, "gfx1100"), hip="7.0"), "gfx1100"),
    # Both capabilities are also those of profiled NVIDIA cards.
    "BI-V150": (fake_torch(card("Iluvatar BI-V150", 8, 0), corex=True), "torch.corex"),
    "P800": (fake_torch(card("P800", 9, 0)), "P800, compute capability 9.0"),
    "Intel": (fake_torch(xpu=Backend(card("Arc A770"))), "torch.xpu"),
    "Enflame": (fake_torch(gcu=Backend(card("S60"))), "torch.gcu"),
}


@pytest.mark.parametrize(("torch", "name"), MACHINES.values(), ids=MACHINES.keys())
def test_every_vendor_is_found(monkeypatch: pytest.MonkeyPatch, torch: Any, name: str) -> None:
    use_torch(monkeypatch, torch)
    assert detect() == name


def test_a_c550_of_capability_8_0_encodes_as_a_c550(monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_80 rejects e4m3, this card does not: its number is not its capability, and no e4m3 case is left out for it."""
    use_torch(monkeypatch, fake_torch(card("MetaX C550", 8, 0)))
    found = detect()
    monkeypatch.undo()  # from here the real torch and Triton
    assert load(found).lowering["e4m3_encode"] == "cast" != load("nvidia-a100").lowering["e4m3_encode"]
    with interpret.poison():
        for content in ("thresholds", "not finite", "zeros"):
            run(insert, make(Case(41, 2, 16, content=content)), profile=found)
    launch = last_launch()
    assert (launch.profile, launch.lowerings["e4m3_encode"]) == ("metax-c550", "cast")


def test_every_profile_is_found_somewhere() -> None:
    assert {name for _, name in MACHINES.values()} == set(names()) - {"generic"}


@pytest.mark.parametrize(("torch", "seen"), STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_generic_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, torch: Any, seen: str
) -> None:
    use_torch(monkeypatch, torch)
    with pytest.warns(RuntimeWarning) as caught:
        assert [detect(), detect(), detect(0)] == ["generic"] * 3
    (warning,) = caught
    assert str(warning.message) == (
        f"no vendor profile describes {seen}; using generic, the most careful one. "
        f"TILEWRIGHT_DEVICE can name another: {', '.join(names())}"
    )
    assert warning.filename == __file__


def test_one_warning_a_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, fake_torch(UNKNOWN, UNKNOWN, card("NVIDIA L40S", 8, 9), H200))
    with pytest.warns(RuntimeWarning) as caught:
        found = [detect(f"cuda:{index}") for index in range(4)]
    assert found == ["generic", "generic", "generic", "nvidia-h200"]
    assert len(caught) == 2


def test_triton_driver_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, fake_torch(card("C550", 8, 0)))
    use_driver(monkeypatch, "maca")
    assert detect() == "metax-c550"


def test_a_backend_of_many_vendors_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, fake_torch(card("unheard of", 9, 0)))
    use_driver(monkeypatch, "cuda")
    with pytest.warns(RuntimeWarning, match="unheard of"):
        assert detect() == "generic"


@pytest.mark.parametrize(
    "device", ["cuda:1", "cuda", 1, None, SimpleNamespace(type="cuda", index=1)]
)
def test_ways_to_name_a_device(monkeypatch: pytest.MonkeyPatch, device: object) -> None:
    torch = fake_torch(card("NVIDIA A100", 8, 0), H200)
    torch.cuda.current_device = lambda: 1
    use_torch(monkeypatch, torch)
    assert detect(device) == "nvidia-h200"


def test_a_device_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch(H200)
    asked: list[int] = []
    torch.cuda.get_device_properties = lambda index: asked.append(index) or H200
    use_torch(monkeypatch, torch)
    assert [detect(), detect(0), detect("cuda:0")] == ["nvidia-h200"] * 3
    assert asked == [0]


@pytest.mark.parametrize("device", [None, "cpu", "meta", SimpleNamespace(type="cpu", index=None)])
def test_a_cpu_is_generic_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, device: object
) -> None:
    use_torch(monkeypatch, fake_torch())
    assert detect(device) == "generic"


def test_real_torch_on_its_cpu() -> None:
    torch = pytest.importorskip("torch")
    assert detect(torch.device("cpu")) == "generic"


def test_no_torch_is_generic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert detect() == "generic"


@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "npu", "npu:0", "version", 1.5])
def test_an_absent_device_is_named(monkeypatch: pytest.MonkeyPatch, device: object) -> None:
    use_torch(monkeypatch, fake_torch(H200))
    with pytest.raises(DeviceError) as caught:
        detect(device)
    assert str(caught.value) == (
        f"detect: there is no device {device} here; TILEWRIGHT_DEVICE can name the profile of one"
    )


@pytest.mark.parametrize("device", [None, "cpu", "cuda:0"])
def test_the_variable_goes_before_everything(
    monkeypatch: pytest.MonkeyPatch, device: object
) -> None:
    use_torch(monkeypatch, fake_torch(H200))
    assert detect("cuda:0") == "nvidia-h200"
    monkeypatch.setenv("TILEWRIGHT_DEVICE", "metax")
    assert detect(device) == "metax-c550"
    monkeypatch.delenv("TILEWRIGHT_DEVICE")
    assert detect("cuda:0") == "nvidia-h200"


def test_a_variable_that_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEVICE", "h20")
    with pytest.raises(ProfileError) as caught:
        detect()
    first, *rest = str(caught.value).splitlines()
    assert first == "TILEWRIGHT_DEVICE: no vendor profile is called 'h20'; names and aliases are"
    assert [line.split()[0] for line in rest] == list(names())
