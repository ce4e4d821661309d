"""Tilewright: an operator is an arrangement of symbolic tensors and an application to their tiles.

A generator joins the two with a vendor profile into readable Triton, at build time, on a machine with no GPU.
"""

from tilewright.launch import Launch, last_launch

__version__ = "0.1.0"
__all__ = ["Launch", "__version__", "last_launch", "ops"]


def __getattr__(name: str) -> object:
    """`tilewright.ops` on first use: operators are declared when somebody asks for one."""
    if name == "ops":
        import importlib

        return importlib.import_module("tilewright.ops")
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
