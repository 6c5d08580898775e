"""The address at which ranks of other machines reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from inflight.errors import ConfigurationError

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface, which gloo reads, too; unset = that of the host's name."""
SIOCGIFADDR = 0x8915
NAME_BYTES = 15
ADDRESS = slice(20, 24)
"""Where the address is in the kernel's answer, an ifreq with a sockaddr_in."""


def host_address() -> str:
    """An IPv4 address of this machine. Raises ConfigurationError if the interface has none."""
    name = os.environ.get(INTERFACE, "")
    if not name:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:NAME_BYTES]))
        except OSError:
            raise ConfigurationError(f"the network interface {name} ({INTERFACE}) has no IPv4 address here") from None
    return socket.inet_ntoa(answer[ADDRESS])
