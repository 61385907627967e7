"""Rebellions NPUs: refused until their graphs are built here."""

import importlib.util
from typing import Any, ClassVar, NoReturn

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.geometry import GroupKind


class RblnDevice(Device):
    """A Rebellions NPU; :meth:`check_available` always refuses for now."""

    name: ClassVar[str] = "rbln"
    torch_device: ClassVar[torch.device] = torch.device("cpu")
    block_size_multiple: ClassVar[int] = 1024
    default_block_size: ClassVar[int] = 1024
    default_chunk: ClassVar[int] = 128
    default_max_num_seqs: ClassVar[int] = 1
    window_kind: ClassVar[GroupKind] = GroupKind.IN_PLACE_WINDOW

    def check_available(self) -> NoReturn:
        """See the base class."""
        missing = [name for name in ("rebel", "torch_rbln") if importlib.util.find_spec(name) is None]
        what = (
            f"the vendor's packages {' and '.join(missing)}"
            if missing
            else "attention graphs for it in this build"
        )
        raise ConfigurationRefused(f"device rbln cannot be used: missing {what}; use --device cpu or cuda")

    def product_name(self) -> NoReturn:
        """See the base class."""
        self.check_available()

    def free_memory(self) -> NoReturn:
        """See the base class."""
        self.check_available()

    def cache_shape(self, *_: Any) -> NoReturn:
        """See the base class."""
        self.check_available()

    def plan(self, *_: Any) -> NoReturn:
        """See the base class."""
        self.check_available()

    def attend(self, *_: Any) -> NoReturn:
        """See the base class."""
        self.check_available()
