"""`triptych serve`: `triptych up` under the name and with the defaults of `vllm serve`."""

import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from deploy.commands import up
from deploy.launcher.settings import LaunchSettings


class ServeSettings(LaunchSettings):
    """Serves one model on this machine, with the flags of `vllm serve`: starts all three services.

    It is `triptych up`, except that it listens on all interfaces by default, as vLLM does.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych serve")

    host: str = Field("0.0.0.0", min_length=1)  # noqa: S104 - where clients of vLLM's server find it
    """Address to listen on. The default is every interface of this machine, as in `vllm serve`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C or SIGTERM; returns what `triptych up` returns."""
    return up.main(argv, ServeSettings)


if __name__ == "__main__":
    sys.exit(main())
