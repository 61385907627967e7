"""What a worker can be told: flags (``--kv-memory``), or ``TRIPTYCH_*`` variables of the same name."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from protos.logs import LogFormat, LogLevel
from protos.settings import ServiceSettings

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Backend = Literal["auto", "compiled", "eager"]
# What a compiler is called in vLLM-Spyre's VLLM_SPYRE_DYNAMO_BACKEND.
_COMPILERS = ("inductor", "sendnn", "sendnn_decoder")


class Settings(ServiceSettings, cli_prog_name="triptych worker"):
    """One worker: which model, on what, and whom it serves. Shapes are the scheduler's to set."""

    reference_names: ClassVar[dict[str, str]] = {
        "backend": "VLLM_SPYRE_DYNAMO_BACKEND",
        "compile_strict": "VLLM_RBLN_COMPILE_STRICT_MODE",
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
        " debugging). auto compiles what can be compiled.",
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
