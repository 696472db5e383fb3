"""What Linux says about a network interface. Standard library only.

All functions raise an OSError if there is no such interface, or if it has no IPv4 address.
"""

from __future__ import annotations

import fcntl
import socket
import struct

# Requests and flags, from the header files if.h and sockios.h.
_GET_FLAGS, _GET_ADDRESS, _GET_MASK = 0x8913, 0x8915, 0x891B
_UP, _LOOPBACK = 0x1, 0x8


def is_up_and_not_loopback(name: str) -> bool:
    """Whether an interface may connect this host to others."""
    flags = struct.unpack("H", _ask(name, _GET_FLAGS)[:2])[0]
    return bool(flags & _UP and not flags & _LOOPBACK)


def address_of(name: str) -> str:
    """The IPv4 address of an interface."""
    return socket.inet_ntoa(_ask(name, _GET_ADDRESS)[4:8])


def mask_of(name: str) -> str:
    """The part of its address that belongs to the network, as in 255.255.0.0."""
    return socket.inet_ntoa(_ask(name, _GET_MASK)[4:8])


def _ask(name: str, request: int) -> bytes:
    """The answer about an interface, without its name in front."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return fcntl.ioctl(asked, request, struct.pack("256s", name.encode()))[16:]
