"""The worker's settings: flags, then `TRIPTYCH_*` variables, then variables of other stacks."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from protos.limits import MAX_RANKS
from protos.service.common_settings import LinkSecuritySettings
from protos.service.settings import Group, MayBeEmpty
from worker_svc.devices.registry import DEVICES, DeviceOptions, DeviceSetting, RblnBackend
from worker_svc.ranks.layout import RankLayout
from worker_svc.vllm_settings import (
    MAX_GIB,
    CompilationConfig,
    check_overrides,
    literal,
    vllm_kv_space,
    warn_of_kv_space,
)

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Backend = Literal["auto", "compiled", "eager"]
# A step that the scheduler still waits for is never cut off.
_HANG_FACTOR = 1.5
# The scheduler's default, for schedulers that do not say theirs.
_USUAL_STEP_TIMEOUT_S = 120.0
_MAX_PORT = 65_535
_SET_SIZES = "set --tensor-parallel-size or --pipeline-parallel-size"
# The variable that vLLM-RBLN's runtime reads, and vLLM-RBLN's own name of it.
_PROFILERS = ("RBLN_PROFILER", "VLLM_RBLN_PROFILER")
# By setting, the words of vLLM-Spyre that need a Spyre card, and what to write instead.
_SPYRE = {
    "device": (("spyre",), "auto, cpu, cuda or rbln"),
    "backend": (
        ("sendnn", "sendnn_decoder", "sendnn_compile_only", "sendnn_warmup_only"),
        "inductor or eager",
    ),
}


class Settings(LinkSecuritySettings, cli_prog_name="triptych worker"):
    """Runs a model on a device for a scheduler, which sets the shapes."""

    model_config = SettingsConfigDict(
        cli_shortcuts={"optimization-level": "O"}, use_attribute_docstrings=True
    )

    section: ClassVar[str] = "worker"
    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.MODEL: (
            "model", "revision", "dtype", "load_format", "pooling_task", "trust_remote_code",
            "language_model_only", "generation_config", "override_generation_config", "seed",
        ),
        Group.DEVICE: (
            "device", "cpu_threads", "rbln_backend", "rbln_use_device_tensor",
            "rbln_num_devices_per_local_rank", "rbln_use_custom_kernel", "rbln_moe_use_opt_kernel",
            "rbln_moe_custom_kernel", "sampling_on_device",
        ),
        Group.RANKS: (
            "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "rank",
            "world_size", "local_rank", "replica_id", "master",
        ),
        Group.LORA: ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"),
        Group.KV_MEMORY: ("kv_memory", "kv_share", "window_kv"),
        Group.COMPILATION: (
            "backend", "optimization_level", "compilation_config", "compile_cache", "compile_cache_root",
            "compile_cache_dir", "require_precompiled", "enable_warm_up", "compile_only", "compile_strict",
        ),
        Group.STRUCTURED_OUTPUT: (
            "grammar_threads", "grammar_time_s", "grammar_memory_mib", "grammar_cache_mib",
            "jump_ahead_tokens",
        ),
        Group.ADDRESSES: ("port", "scheduler_address", "advertise_host"),
        Group.TIMEOUTS: ("stall_timeout_s", "hang_timeout_s", "configure_hang_timeout_s", "max_failed_steps"),
    }  # fmt: skip

    needs_master: ClassVar[bool] = True
    """Whether several ranks need an address to meet at; a launcher chooses it."""

    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "language_model_only": "VLLM_RBLN_DISABLE_MM",
        "backend": ("VLLM_SPYRE_DYNAMO_BACKEND", "SENDNN_INFERENCE_DYNAMO_BACKEND"),
        "compile_strict": "VLLM_RBLN_COMPILE_STRICT_MODE",
        "compile_only": "VLLM_RBLN_COMPILE_ONLY",
        "enable_warm_up": "VLLM_RBLN_ENABLE_WARM_UP",
        "compile_cache_root": "VLLM_CACHE_ROOT",
        "compile_cache_dir": "TORCH_SENDNN_CACHE_DIR",
        "compile_cache": "TORCH_SENDNN_CACHE_ENABLE",
        "require_precompiled": (
            "VLLM_SPYRE_REQUIRE_PRECOMPILED_DECODERS",
            "SENDNN_INFERENCE_REQUIRE_PRECOMPILED_DECODERS",
        ),
        "rbln_use_device_tensor": "VLLM_RBLN_USE_DEVICE_TENSOR",
        "rbln_num_devices_per_local_rank": ("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", "VLLM_RBLN_TP_SIZE"),
        "rbln_use_custom_kernel": ("RBLN_USE_CUSTOM_KERNEL", "VLLM_RBLN_USE_CUSTOM_KERNEL"),
        "rbln_moe_use_opt_kernel": "VLLM_RBLN_MOE_USE_OPT_KERNEL",
        "rbln_moe_custom_kernel": "VLLM_RBLN_MOE_CUSTOM_KERNEL",
        "grammar_cache_mib": "VLLM_XGRAMMAR_CACHE_MB",
    }
    reference_opposites: ClassVar[Mapping[str, str]] = {"compile_cache": "VLLM_DISABLE_COMPILE_CACHE"}
    also_set_by: ClassVar[Mapping[str, str]] = {"compilation_config": "optimization_level"}

    model: str = Field(min_length=1)
    """A Hugging Face id, a folder with config.json and safetensors, or a .gguf file."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a model on the Hugging Face hub."""
    device: DeviceSetting = "auto"
    """Device to run on. auto takes an NPU if available, else a GPU, else the CPU."""
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """Ranks that split every layer of the model between them."""
    pipeline_parallel_size: int = Field(1, ge=1, le=1024)
    """Stages that split the model by layers. A replica consists of this many times --tensor-parallel-size
    ranks."""
    enable_expert_parallel: bool = False
    """Split expert layers by experts instead of within each expert."""
    rank: int = Field(0, ge=0)
    """This process' rank in its replica: its stage times --tensor-parallel-size, plus its place there."""
    world_size: int | None = Field(None, ge=1)
    """Ranks of the replica, for a check. Default: the product of the two sizes."""
    local_rank: int | None = Field(None, ge=0, le=1024)
    """Index of this rank's GPU among those of its host. Default: --rank, modulo the number of GPUs."""
    replica_id: str = Field("", validate_default=False)
    """Name of the replica, the same for all of its ranks. Default, for a single rank: a generated name."""
    master: str = Field("", validate_default=False)
    """host:port where rank 0 listens for the other ranks of its replica."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. auto is the type of the saved model."""
    pooling_task: Literal["auto", "embed", "classify", "token_embed", "token_classify"] = "auto"
    """Task of a pooling model's graphs. auto is the model's own; see docs/pooling.md."""
    load_format: LoadFormat = "auto"
    """Format of the weights. auto takes safetensors if there are any, else a GGUF file; dummy makes up
    weights, for measurements."""
    trust_remote_code: bool = False
    """Allow a model's own Python code to run in this process."""
    language_model_only: bool = False
    """Serve the text model of a multimodal checkpoint and leave its other weights unread. Without it, such
    checkpoints are refused."""
    generation_config: str = Field("auto", min_length=1)
    """Source of sampling parameters omitted by a request: auto (the model's generation_config.json), a folder
    with such a file, or vllm (none; see docs/sampling.md)."""
    override_generation_config: Annotated[dict[str, Any], NoDecode] = Field(default_factory=dict)
    """JSON with sampling parameters that override those, for example {"temperature": 0.7,
    "max_new_tokens": 1024}."""
    enable_lora: bool = False
    """Serve LoRA adapters in addition to the model."""
    max_loras: int = Field(4, ge=1, le=256)
    """Different adapters in a step; the device reserves memory for as many."""
    max_lora_rank: int = Field(16, ge=1, le=512)
    """Highest rank of an adapter. Memory and time of a step with adapters grow with it."""
    max_cpu_loras: int | None = Field(None, ge=1, le=10_000)
    """Adapters kept on the host, including those on the device. Default: twice --max-loras."""
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the adapters' weights. auto is the model's."""
    kv_memory: float | None = Field(None, ge=0, le=MAX_GIB)
    """Memory for the KV cache, GiB; 0 for --kv-share of the free memory. Default: VLLM_CPU_KVCACHE_SPACE on a
    CPU, if set, else 0."""
    kv_share: float = Field(0.4, gt=0, le=1)
    """The KV cache's share of the memory left free by weights and graphs."""
    window_kv: Literal["auto", "paged", "in-place"] = "auto"
    """KV memory of sliding-window layers: paged blocks, or a block per request in which the window slides in
    place, as NPU kernels do. auto follows the device's kernels."""
    backend: Backend = "auto"
    """How steps run: compiled (a static graph per shape, made before serving) or eager (the model's Python
    code, for debugging). auto makes graphs of all static steps."""
    optimization_level: int | None = Field(None, ge=0, le=3)
    """How graphs are made (-O): 0 eager; 1 the device's own kernels; 2 generated kernels between them; 3 the
    fastest of several generated kernels. Default: 1 on a CPU, 2 on a GPU. An NPU uses its own compiler, with
    no levels above 1."""
    compilation_config: Annotated[CompilationConfig | None, NoDecode] = None
    """vLLM's JSON, or the same as a Python literal: {"level": N} is -O N, as is N alone;
    candidate_compile_sizes lists the decode buckets to generate kernels for. -O takes the JSON, too."""
    compile_cache_root: Path = Path("~/.cache/triptych/compiled")
    """Folder of the compile cache (a folder for each kind of device) and of the digests of weight files."""
    compile_cache_dir: Path | None = None
    """Folder of this device's compiled code. Default: the device's folder in --compile-cache-root."""
    compile_cache: bool = True
    """Keep compiled code and reuse it in later starts."""
    require_precompiled: bool = False
    """Refuse to start if code would have to be compiled. The check runs before weights are loaded."""
    enable_warm_up: bool = True
    """Make and run every graph before serving. Otherwise the first request of each shape waits for its
    graph."""
    compile_only: bool = False
    """Compile without a device: for triptych compile on a machine without an NPU."""
    compile_strict: bool = False
    """Refuse steps that cannot be a graph, and after warm-up fail a step whose graph is missing instead of
    logging a warning. An NPU's compiler runs in its strict mode."""
    rbln_use_device_tensor: bool = True
    """Keep weights, inputs and KV cache of NPU graphs in tensors on the NPU. Otherwise the vendor's runtime
    owns the KV cache, as in its older releases, and models with several kinds of attention reuse less of a
    prompt."""
    rbln_num_devices_per_local_rank: int = Field(1, ge=1, le=64)
    """NPUs that work together as this worker's device, for models that do not fit into one."""
    rbln_use_custom_kernel: bool = False
    """Run NPU attention in Triton kernels (rbln_triton_ops) instead of the compiler's own
    (rbln_custom_ops)."""
    rbln_moe_use_opt_kernel: bool = True
    """Run NPU expert layers in the vendor's single operator."""
    rbln_moe_custom_kernel: bool = False
    """Use the vendor's expert operator although --rbln-moe-use-opt-kernel is off. With both off, experts run
    in plain operators."""
    sampling_on_device: bool = False
    """Draw tokens of requests without a seed on the NPU if they use only temperature, top-k and top-p. Needs
    --device rbln; docs/npu.md has the differences."""
    rbln_backend: RblnBackend = DeviceOptions.rbln_backend
    """Compiler of graphs for --device rbln. rbln-check runs them on this CPU and refuses what an NPU cannot
    do; it needs none of the vendor's packages, so it shows whether a model suits an NPU."""
    grammar_threads: int = Field(2, ge=1, le=64)
    """Grammars compiled at the same time."""
    grammar_time_s: float = Field(5.0, ge=1, le=600)
    """Most CPU time to compile a grammar, seconds."""
    grammar_memory_mib: int = Field(1024, ge=64, le=1 << 20)
    """Most memory to compile a grammar, MiB."""
    grammar_cache_mib: int = Field(256, ge=0, le=1 << 20)
    """Memory for compiled grammars, MiB. Grammars of running requests count and are never evicted, even above
    this limit. 0: of the others, only the newest is kept."""
    jump_ahead_tokens: int = Field(4, ge=0, le=1024)
    """Emit tokens without sampling when a grammar forces at least this many in a row; they are computed as
    a chunk. 0: never."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the process's own random numbers, such as made-up weights. Requests bring their own seeds."""
    cpu_threads: int | None = Field(None, ge=1, le=1024)
    """Threads of CPU kernels. Default: all cores."""
    port: int = Field(50061, ge=0, le=65535)
    """Port to listen on; 0 for any free one."""
    scheduler_address: MayBeEmpty = Field("127.0.0.1:50051", pattern=r"^(.+:\d+|unix:.+)?$")
    """host:port or unix:PATH of the scheduler to register with. Empty: register nowhere and wait for a
    scheduler to connect."""
    advertise_host: str = Field("", validate_default=False)
    """Host at which the scheduler connects to this worker. Default: the address that the registration comes
    from."""
    stall_timeout_s: float = Field(60.0, gt=0, le=86_400)
    """Report NOT_SERVING while a step takes longer, seconds."""
    hang_timeout_s: float | None = Field(None, ge=0, le=86_400)
    """End the process when a step takes longer, so that its supervisor restarts it, seconds. Default: half as
    much again as the scheduler's --step-timeout-s. 0: never."""
    configure_hang_timeout_s: float = Field(3600.0, ge=0, le=86_400)
    """End the process when loading, compiling and warming up report no progress for longer, seconds. With
    --no-enable-warm-up it holds for steps too, which then make graphs. 0: never."""
    max_failed_steps: int = Field(5, ge=0, le=1000)
    """End the process when this many steps in a row fail, so that its supervisor restarts it. 0: never."""

    @model_validator(mode="before")
    @classmethod
    def _level_is_a_configuration(cls, data: Any) -> Any:
        """Takes `-O '{"level": 3}'`, the older form of `--compilation-config`."""
        if not isinstance(data, dict):
            return data
        level = data.get("optimization_level")
        if not (isinstance(level, dict) or (isinstance(level, str) and level.lstrip().startswith("{"))):
            return data
        if data.get("compilation_config") is not None:
            raise ValueError("-O and --compilation-config both have a configuration; set one of them")
        rest = {name: value for name, value in data.items() if name != "optimization_level"}
        return {**rest, "compilation_config": level}

    @field_validator("compilation_config", mode="before")
    @classmethod
    def _level_or_mapping(cls, value: Any) -> Any:
        read = literal(value) if isinstance(value, str) else value
        return {"level": read} if isinstance(read, int) else read

    @field_validator("override_generation_config", mode="before")
    @classmethod
    def _json_object(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError('should be JSON, for example {"temperature": 0.7}') from error

    @field_validator("override_generation_config")
    @classmethod
    def _in_bounds(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_overrides(value)
        return value

    @field_validator("device", "backend", mode="before")
    @classmethod
    def _without_spyre(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses the words of Spyre, and maps `inductor`, a backend of vLLM-Spyre."""
        words, instead = _SPYRE[info.field_name or ""]
        if value in words:
            raise ValueError(f"should be {instead}: Triptych serves no Spyre cards")
        return "compiled" if (info.field_name, value) == ("backend", "inductor") else value

    @field_validator("master")
    @classmethod
    def _address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        valid = host and port.isascii() and port.isdecimal() and 1 <= int(port) <= _MAX_PORT
        if value and not valid:
            raise ValueError(f"should be host:port with a port from 1 to {_MAX_PORT}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        asked = self.optimization_level
        config = self.compilation_config.level if self.compilation_config else None
        if asked is not None and config is not None and asked != config:
            raise ValueError(f"-O {asked} and --compilation-config's level {config} differ; set one of them")
        level = config if asked is None else asked
        self._check_ranks()
        if self.kv_memory is None and (self.device == "auto" or DEVICES[self.device].reads_vllm_kv_space):
            vllm_kv_space()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"--max-cpu-loras {self.max_cpu_loras} is below --max-loras {self.max_loras};"
                " adapters on the device stay on the host, too"
            )
        if self.sampling_on_device:
            self._check_sampling_on_device(level)
        if self.backend == "compiled" and level == 0:
            raise ValueError("--backend compiled and -O 0 (eager) contradict each other; drop one")
        if self.require_precompiled and not self.compile_cache:
            raise ValueError(
                "--require-precompiled needs the compile cache, but --no-compile-cache"
                " or VLLM_DISABLE_COMPILE_CACHE turns it off; omit one of them"
            )
        return self

    @model_validator(mode="after")
    def _schedulers_reach_it(self) -> "Settings":
        if not self.host and self.scheduler_address and not self.scheduler_address.startswith("unix:"):
            raise ValueError(
                "with an empty --host only --socket is left, which a scheduler at host:port does not reach;"
                " set --host, or --scheduler-address to unix:PATH or empty"
            )
        return self

    def _check_sampling_on_device(self, level: int | None) -> None:
        if self.device == "auto" or not DEVICES[self.device].draws_tokens:
            raise ValueError(
                f"--sampling-on-device needs --device rbln, not {self.device}; omit it or change the device"
            )
        if self.tensor_parallel_size > 1:
            raise ValueError(
                "--sampling-on-device needs --tensor-parallel-size 1, because NPUs draw different tokens;"
                " omit one of them"
            )
        if self.backend == "eager" or level == 0:
            raise ValueError("--sampling-on-device needs compiled graphs; omit it, --backend eager or -O 0")
        if not (self.rbln_use_device_tensor or self.rbln_backend == "rbln-check"):
            raise ValueError(
                "--sampling-on-device needs logits on the NPU; omit it or --no-rbln-use-device-tensor"
            )

    def _check_ranks(self) -> None:
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        count = tensor * pipeline
        if count > MAX_RANKS:
            raise ValueError(
                f"--tensor-parallel-size {tensor} times --pipeline-parallel-size {count // tensor} is more than {MAX_RANKS} ranks"
            )
        if self.world_size is not None and self.world_size != count:
            raise ValueError(
                f"--world-size {self.world_size} is not --tensor-parallel-size {tensor} times"
                f" --pipeline-parallel-size {pipeline}; {_SET_SIZES}, or omit --world-size"
            )
        if self.rank >= count:
            advice = _SET_SIZES if count == 1 else f"ranks are 0 to {count - 1}"
            raise ValueError(f"--rank {self.rank} does not exist in a replica of {count}; {advice}")
        if self.enable_expert_parallel and tensor == 1:
            raise ValueError(
                "--enable-expert-parallel splits experts over the ranks of a stage, and there is one;"
                " raise --tensor-parallel-size or omit it"
            )
        if pipeline > 1 and os.environ.get("VLLM_PP_LAYER_PARTITION"):
            raise ValueError(
                "VLLM_PP_LAYER_PARTITION is not supported; unset it, and stages get layers evenly"
            )
        for name in _PROFILERS:
            if count > 1 and os.environ.get(name, "").lower() not in {"", "0", "false"}:
                raise ValueError(
                    f"{name} works in one process, and this replica has {count}; unset it or use one rank"
                )
        if self.needs_master and count > 1 and not (self.master and self.replica_id):
            raise ValueError(
                f"a replica of {count} ranks needs --master host:port, where rank 0 listens for the others,"
                " and --replica-id; give all ranks the same"
            )

    @property
    def device_options(self) -> DeviceOptions:
        """The settings of `open_device`."""
        return DeviceOptions(
            local_rank=self.rank if self.local_rank is None else self.local_rank,
            rank=self.rank,
            world_size=self.layout.world_size,
            rbln_backend=self.rbln_backend,
            rbln_use_custom_kernel=self.rbln_use_custom_kernel,
            rbln_use_device_tensor=self.rbln_use_device_tensor,
            rbln_num_devices=self.rbln_num_devices_per_local_rank,
            compile_only=self.compile_only,
            compile_strict=self.compile_strict,
            rbln_moe_use_opt_kernel=self.rbln_moe_use_opt_kernel,
            rbln_moe_custom_kernel=self.rbln_moe_custom_kernel,
            sampling_on_device=self.sampling_on_device,
            cpu_threads=self.cpu_threads,
        )

    @property
    def layout(self) -> RankLayout:
        """This process' place in its replica."""
        return RankLayout(
            self.rank, self.tensor_parallel_size, self.pipeline_parallel_size, self.enable_expert_parallel
        )

    def step_limit_s(self, step_timeout_s: float) -> float:
        """Returns how long a step may take before the process counts as hung, seconds; 0 for any time.

        Args:
            step_timeout_s: how long the scheduler waits for a step; 0 if it did not say.
        """
        hang_s = self.hang_timeout_s
        if hang_s is None:
            hang_s = _HANG_FACTOR * (step_timeout_s or _USUAL_STEP_TIMEOUT_S)
        limits = (hang_s,) if self.enable_warm_up else (hang_s, self.configure_hang_timeout_s)
        return max(limits) if all(limits) else 0.0

    @property
    def first_step_timeout_s(self) -> float:
        """How long a step that makes its graph may take, seconds; 0 if warm-up makes all graphs."""
        return 0.0 if self.enable_warm_up else self.configure_hang_timeout_s or math.inf

    def level_for(self, default: int) -> int:
        """Returns the optimization level, 0 to 3; `default` is the device's."""
        if self.backend == "eager":
            return 0
        config = self.compilation_config.level if self.compilation_config else None
        asked = config if self.optimization_level is None else self.optimization_level
        return default if asked is None else asked

    def kv_memory_on(self, device: str) -> float | None:
        """Returns the GiB of KV cache on a device, or `None` if --kv-share decides."""
        if self.kv_memory is not None:
            return self.kv_memory or None
        if DEVICES[device].reads_vllm_kv_space:
            return vllm_kv_space()
        warn_of_kv_space(device)
        return None

    @property
    def digest_folder(self) -> Path:
        """The folder that keeps the digests of weight files."""
        return self.compile_cache_root.expanduser() / "weights"

    def cache_folder(self, device: str) -> Path | None:
        """Returns the folder for a device's compiled code, or `None` if the compile cache is off."""
        if not self.compile_cache:
            return None
        folder = self.compile_cache_dir or self.compile_cache_root / device
        return folder.expanduser()
