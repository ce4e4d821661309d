"""What each device is and can do: `<device>.toml` profiles, their schema, and detection.

`load("h200")` gives a profile, `names()` lists them, `detect()` says which one describes a device.
A new card is one new file, its detection included.
"""

from tilewright.vendors.detect import detect
from tilewright.vendors.profile import VendorProfile, load, names, parse

__all__ = ["VendorProfile", "detect", "load", "names", "parse"]
