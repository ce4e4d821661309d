"""What Tilewright raises.

A call that breaks an operator's contract raises a `ContractError` (a `ValueError`) before anything is launched or
written; it names every problem of the call. The other classes say which room a mistake was made in.
"""

from __future__ import annotations


class TilewrightError(Exception):
    """Base of everything Tilewright raises on purpose."""


class ContractError(TilewrightError, ValueError):
    """A call breaks the operator's contract in several ways; the message lists all of them."""


class ShapeError(ContractError):
    """Every problem of the call is one of sizes."""


class DtypeError(ContractError):
    """Every problem of the call is one of dtypes."""


class LayoutError(ContractError):
    """Every problem of the call is one of strides or contiguity."""


class DeviceError(ContractError):
    """Every problem of the call is one of devices."""


class ArrangementError(TilewrightError, ValueError):
    """An arrangement does something its tensors do not allow."""


class ApplicationError(TilewrightError, ValueError):
    """An application uses a word or a form that has no meaning; the message carries its file and line."""


class GenerationError(TilewrightError, ValueError):
    """An arrangement, an application and a profile do not fit together."""


class ProfileError(TilewrightError, ValueError):
    """A vendor profile or a configuration file is malformed."""


class BuildError(TilewrightError, ValueError):
    """A standalone build cannot be made as asked."""


class CaptureError(TilewrightError, RuntimeError):
    """A call does something that would break the CUDA graph that is being captured."""
