"""Addresses at which the members of a transfer group listen: of the cluster's own network, never of all."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""


def address_towards(host: str, port: int) -> str:
    """Return the address that this machine uses for connections to ``host``; nothing is sent.

    Raises:
        OSError: the name is unknown, or no route leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket this only looks the route up
        own: str = probe.getsockname()[0]
        return own


def interface_address(name: str, key: str = "weight_sync.interface") -> str:
    """Return the IPv4 address of a network interface, which ``key`` of the recipe names.

    Raises:
        OSError: this machine has no such interface, or it has no address; the message names those that exist.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(known for _, known in socket.if_nameindex())
            raise OSError(
                f"{key} is {name!r}, which has no IPv4 address on {socket.gethostname()}: set it to one of {names}"
            ) from error
    return socket.inet_ntoa(found[20:24])
