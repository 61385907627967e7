"""What a worker can be told: flags (``--kv-memory``), or ``TRIPTYCH_*`` variables of the same name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protos.logs import LogFormat, LogLevel
from protos.settings import Group, ServiceSettings

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Backend = Literal["auto", "compiled", "eager"]
# What a compiler is called in vLLM-Spyre's VLLM_SPYRE_DYNAMO_BACKEND.
_COMPILERS = ("inductor", "sendnn", "sendnn_decoder")


class CompilationConfig(BaseModel):
    """The part of vLLM's ``--compilation-config`` that means something here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: int | None = Field(None, ge=0, le=3)
    candidate_compile_sizes: tuple[int, ...] | None = None


class Settings(ServiceSettings, cli_prog_name="triptych worker"):
    """One worker: which model, on what, and whom it serves. Shapes are the scheduler's to set."""

    model_config = SettingsConfigDict(cli_shortcuts={"optimization-level": "O"})

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.MODEL: ("model", "revision", "dtype", "load_format", "trust_remote_code", "seed"),
        Group.DEVICE: (
            "device",
            "cpu_threads",
            "rbln_backend",
            "rbln_use_custom_kernel",
            "rbln_moe_use_opt_kernel",
            "rbln_moe_custom_kernel",
        ),
        Group.KV_MEMORY: ("kv_memory", "kv_share", "window_kv"),
        Group.COMPILATION: (
            "backend",
            "optimization_level",
            "compilation_config",
            "compile_cache",
            "disable_compile_cache",
            "compile_cache_root",
            "compile_cache_dir",
            "require_precompiled",
            "enable_warm_up",
            "compile_only",
            "compile_strict",
        ),
        Group.STRUCTURED_OUTPUT: (
            "grammar_threads",
            "grammar_time_s",
            "grammar_memory_mib",
            "grammar_cache_mib",
            "jump_ahead_tokens",
        ),
        Group.ADDRESSES: ("host", "port", "scheduler_address", "advertise_host"),
        Group.TIMEOUTS: ("stall_timeout_s",),
        Group.LOGGING: ("log_level", "log_format"),
    }

    reference_names: ClassVar[Mapping[str, str]] = {
        "backend": "VLLM_SPYRE_DYNAMO_BACKEND",
        "compile_strict": "VLLM_RBLN_COMPILE_STRICT_MODE",
        "compile_only": "VLLM_RBLN_COMPILE_ONLY",
        "enable_warm_up": "VLLM_RBLN_ENABLE_WARM_UP",
        "compile_cache_root": "VLLM_CACHE_ROOT",
        "compile_cache_dir": "TORCH_SENDNN_CACHE_DIR",
        "compile_cache": "TORCH_SENDNN_CACHE_ENABLE",
        "disable_compile_cache": "VLLM_DISABLE_COMPILE_CACHE",
        "require_precompiled": "VLLM_SPYRE_REQUIRE_PRECOMPILED_DECODERS",
        "rbln_use_custom_kernel": "RBLN_USE_CUSTOM_KERNEL",
        "rbln_moe_use_opt_kernel": "VLLM_RBLN_MOE_USE_OPT_KERNEL",
        "rbln_moe_custom_kernel": "VLLM_RBLN_MOE_CUSTOM_KERNEL",
    }

    model: str = Field(
        min_length=1,
        description="A Hugging Face id, a folder with config.json and safetensors, or a .gguf file.",
    )
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a hub model.")
    device: Literal["auto", "cpu", "cuda", "rbln"] = Field(
        "auto", description="What to run on; auto takes a GPU if there is one, else the CPU."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and activations; auto is what the model was saved in."
    )
    load_format: LoadFormat = Field(
        "auto",
        description="How weights are stored; auto takes safetensors, else a GGUF file; dummy makes them up (for measuring).",
    )
    trust_remote_code: bool = Field(
        False, description="Whether Python code that comes with a model may run in this process."
    )
    kv_memory: float | None = Field(
        None,
        gt=0,
        description="Memory for the KV cache, GiB. Default: --kv-share of what is free.",
    )
    kv_share: float = Field(
        0.4,
        gt=0,
        le=1,
        description="Share of the memory that weights and graphs leave free which the KV cache takes; the rest stays free.",
    )
    window_kv: Literal["auto", "paged", "in-place"] = Field(
        "auto",
        description="How layers with a window keep it: in paged blocks, or sliding in one block a request, as NPU kernels do."
        " auto is what the device's kernels do.",
    )
    backend: Backend = Field(
        "auto",
        description="How steps run: compiled (one static graph a shape, made before serving) or eager (the model's Python code, for"
        " debugging). auto makes graphs of what is static.",
    )
    optimization_level: int | None = Field(
        None,
        ge=0,
        le=3,
        description="What graphs are made of (-O): 0 eager; 1 the kernels that the device comes with; 2 generated kernels between them;"
        " 3 the fastest of several. Default: 1 on a CPU, 2 on a GPU; an NPU has its own compiler.",
    )
    compilation_config: CompilationConfig | None = Field(
        None,
        description='vLLM\'s JSON: {"level": N} is -O N; candidate_compile_sizes lists the decode buckets to generate kernels for.',
    )
    compile_cache_root: Path = Field(
        Path("~/.cache/triptych/compiled"),
        description="Compiled code is kept here, in a folder a kind of device.",
    )
    compile_cache_dir: Path | None = Field(
        None, description="The same, but the folder itself. Default: the device's in --compile-cache-root."
    )
    compile_cache: bool = Field(True, description="Whether compiled code is kept and found again.")
    disable_compile_cache: bool = Field(False, description="vLLM's name for --no-compile-cache.")
    require_precompiled: bool = Field(
        False, description="Refuse to start, before weights are loaded, if code would have to be compiled."
    )
    enable_warm_up: bool = Field(
        True,
        description="Make and run every graph before serving. Without it the first request of each shape waits.",
    )
    compile_only: bool = Field(
        False, description="Compile without a device; triptych compile on a machine without an NPU."
    )
    compile_strict: bool = Field(
        False,
        description="Whether a graph that is missing once the worker serves is an error, not a warning.",
    )
    rbln_use_custom_kernel: bool = Field(
        False,
        description="Attention on an NPU in Triton kernels (rbln_triton_ops) instead of the compiler's own (rbln_custom_ops).",
    )
    rbln_moe_use_opt_kernel: bool | None = Field(
        None,
        description="Expert layers on an NPU in one operator of the vendor's. Default: yes, unless --rbln-backend has none; else see the next.",
    )
    rbln_moe_custom_kernel: bool = Field(
        False,
        description="The same operator, for those who switch the former off; with both off, experts run in plain operators.",
    )
    rbln_backend: Literal["rbln", "rbln-check"] = Field(
        "rbln",
        description="Who compiles graphs for --device rbln; rbln-check runs them on this CPU and refuses what an NPU could not (for tests).",
    )
    grammar_threads: int = Field(
        2, ge=1, le=64, description="Grammars of constrained requests that are compiled at once."
    )
    grammar_time_s: float = Field(
        5.0, ge=1, le=600, description="CPU time that compiling one grammar may take, seconds."
    )
    grammar_memory_mib: int = Field(
        1024, ge=64, le=1 << 20, description="Memory that compiling one grammar may take, MiB."
    )
    grammar_cache_mib: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="Memory for compiled grammars, MiB; those that running requests need count, and stay beyond it.",
    )
    jump_ahead_tokens: int = Field(
        4,
        ge=0,
        le=1024,
        description="Tokens that a grammar allows without a choice are emitted at once, and computed as one chunk, if so many follow"
        " one another; 0: never.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="Of what the process draws by itself; requests have seeds of their own.",
    )
    cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of a CPU's kernels. Default: all cores."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(50061, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    scheduler_address: str = Field(
        "127.0.0.1:50051",
        pattern=r"^(.+:\d+)?$",
        description="host:port of the scheduler; empty: wait to be found.",
    )
    advertise_host: str = Field(
        "",
        description="Host that the scheduler dials back. Default: where it sees this worker's call come from.",
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="A step that takes longer makes the worker report NOT_SERVING, seconds."
    )
    log_level: LogLevel = Field("info", description="Least severe level that is logged.")
    log_format: LogFormat = Field("json", description="json for machines, console for people.")

    @field_validator("backend", mode="before")
    @classmethod
    def _compiler(cls, value: Any) -> Any:
        return "compiled" if value in _COMPILERS else value

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        asked = self.optimization_level
        config = self.compilation_config.level if self.compilation_config else None
        if asked is not None and config is not None and asked != config:
            raise ValueError(f"-O {asked} and --compilation-config's level {config} differ; set one of them")
        level = config if asked is None else asked
        if self.compile_strict and not self.enable_warm_up:
            raise ValueError(
                "--compile-strict allows no graph to be made while serving, and without --enable-warm-up none is made before; drop one"
            )
        if self.backend == "compiled" and level == 0:
            raise ValueError("--backend compiled and -O 0 (eager) contradict each other; drop one")
        return self

    def level_for(self, default: int) -> int:
        """The level of optimization, 0 to 3.

        Args:
            default: the device's.
        """
        if self.backend == "eager":
            return 0
        config = self.compilation_config.level if self.compilation_config else None
        asked = config if self.optimization_level is None else self.optimization_level
        return default if asked is None else asked

    def cache_folder(self, device: str) -> Path | None:
        """Where compiled code for a device is kept; ``None`` if it is not."""
        if self.disable_compile_cache or not self.compile_cache:
            return None
        folder = self.compile_cache_dir or self.compile_cache_root / device
        return folder.expanduser()
