"""Checks of what a replica of several ranks needs, without the other ranks."""

import socket

from deploy.diagnosis.findings import Missing, Remark
from deploy.launcher.service_flags import visible_npus
from worker_svc.settings import Settings


def layout(settings: Settings) -> str:
    """Describes the place of the worker in its replica.

    Raises:
        Remark: if the settings say too little for a worker that no launcher starts.
    """
    place = str(settings.layout)
    if not (settings.master and settings.replica_id):
        raise Remark(
            f"{place}; `triptych worker` needs --master and --replica-id, too, which `triptych up` chooses"
        )
    return f"{place}, in replica {settings.replica_id}"


def master(address: str) -> str:
    """Returns the addresses of the host where ranks meet; nothing is connected.

    Args:
        address: host:port, as in the setting.

    Raises:
        Missing: if the host's name is unknown here.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise Missing(
            f"--master {address}: this machine does not know the host ({error.strerror}); change the name, or"
            " add it to DNS or /etc/hosts"
        ) from error
    return f"{address} is {', '.join(dict.fromkeys(str(place[4][0]) for place in found))}"


def devices(settings: Settings, name: str) -> str:
    """Compares the visible devices with what the ranks of a replica take, if one host has them all.

    Args:
        settings: the worker's.
        name: the device's.

    Raises:
        Remark: if there are too few: the other ranks must be on other hosts.
    """
    import torch

    needed, kind = settings.layout.world_size, "GPU"
    if name == "cuda":
        found = torch.cuda.device_count()
    elif name == "rbln" and settings.rbln_backend == "rbln":
        kind, needed = "NPU", needed * settings.rbln_num_devices_per_local_rank
        found = _num_npus(settings.rbln_num_devices_per_local_rank)
    else:
        return f"{needed} ranks of one host share its cores"
    text = f"{found} {kind}{'' if found == 1 else 's'} visible, and the replica takes {needed}"
    if found < needed:
        raise Remark(f"{text}: start the other ranks on other hosts, or make more {kind}s visible")
    return text


def _num_npus(each: int) -> int:
    """Returns the number of NPUs that a variable lists, or else of those that torch finds.

    Args:
        each: NPUs that torch counts as one device.
    """
    import torch

    _, listed = visible_npus()
    module = getattr(torch, "rbln", None)
    if listed or module is None:
        return len(listed)
    return int(module.device_count()) * each
