"""At which address a socket that listens takes connections."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct

# A filter for packets, from Linux's filter.h: what it consists of, and how it is put on a socket.
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
_IP_HEADER = 0xFFF00000
_DESTINATION = _IP_HEADER + 16
_ATTACH_FILTER = 26


def accept_only(listening: socket.socket, address: str) -> None:
    """Lets a socket hear only what is sent to an IPv4 address.

    It is as if the socket were bound to the address, and can be done when it listens already.
    """
    program = [
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, 3, 4),  # the version of IP
        (_LOAD_WORD, 0, 0, _DESTINATION),
        (_JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(address))),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in program))
    packed = struct.pack("HP", len(program), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, packed)
