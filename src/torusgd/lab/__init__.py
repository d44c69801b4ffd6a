"""A network of several hosts on one machine: real processes and sockets, links of set latency and bandwidth."""

from .network import Host, Lab, interface_bytes, why_not

__all__ = ["Host", "Lab", "interface_bytes", "why_not"]
