"""Command lines of `vllm serve` become ours."""

import pytest

from deploy.vllm_flags.translate import FLAGS, Flag, VllmFlags
from protos.errors import ConfigurationRefused


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Qwen/Qwen3-0.6B --port 8000", ["Qwen/Qwen3-0.6B", "--port=8000"]),
        ("--max_model_len 8K", ["--max-model-len=8192"]),
        ("--max-model-len=8k", ["--max-model-len=8000"]),
        ("-tp 2 -pp=2 -dp 3", ["--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--workers=3"]),
        ("-O3", ["--optimization-level=3"]),
        ("-O 1", ["--optimization-level=1"]),
        ("--dtype half", ["--dtype=float16"]),
        ("--served-model-name a b --enable-lora", ["--served-model-name", "a", "b", "--enable-lora"]),
        ("--lora-modules a=/a b=/b", ["--lora-modules", "a=/a", "b=/b"]),
        ("--no-enable-prefix-caching", ["--no-enable-prefix-caching"]),
        ("--enforce-eager", ["--backend=eager"]),
        ("--no-enforce-eager", []),
        ("--kv-cache-memory-bytes 4G", ["--kv-memory=4"]),
        ("--tool-call-parser hermes --enable-auto-tool-choice", ["--tool-call-parser=hermes"]),
        ("--tool-call-parser qwen3_coder", ["--tool-call-parser=qwen3_coder"]),
        ("--scheduling-policy fcfs", ["--order=arrival"]),
        ("-O{'level':3}", ["--optimization-level={'level':3}"]),
        ("-O {'mode':3}", ['--compilation-config={"level": 3}']),
        ("--compilation-config 3", ["--compilation-config=3"]),
        ("--compilation-config.mode VLLM_COMPILE", ['--compilation-config={"level": 3}']),
        ("-cc.compile_sizes+ 1,2", ['--compilation-config={"candidate_compile_sizes": [1, 2]}']),
        ("-cc.cudagraph_mode FULL", []),
        ("--kv-cache-dtype auto --cpu-offload-gb 0 --quantization awq", []),
        ("--no-enable-sleep-mode --disable-log-stats", []),
        ("--runner pooling --convert embed", ["--pooling-task=embed"]),
        ("m --tokenizer m", ["m"]),
        ("--tokenizer m --model m", ["--model=m"]),
        ("-O.mode=3", ['--compilation-config={"level": 3}']),
        ("-O.level 3 -O.cudagraph_mode FULL", ['--compilation-config={"level": 3}']),
        ("--max-model-len auto", []),
        ("--max_model_len=-1", []),
        ("--max-model-len 25.6k", ["--max-model-len=25600"]),
        ("--load-format runai_streamer", ["--load-format=safetensors"]),
        ("--load-format dummy --quantization awq", ["--load-format=dummy"]),
        ("--task embedding", ["--pooling-task=embed"]),
        ("--task score", ["--pooling-task=classify"]),
        ("--task generate --swap-space 16 --disable-log-requests --num-scheduler-steps 8", []),
        ("--no-disable-log-requests --cuda-graph-sizes 1 2 --use-v2-block-manager m", ["m"]),
        ("--workers 2 --nonsense", ["--workers", "2", "--nonsense"]),
    ],
)
def test_command_lines(theirs: str, ours: list[str]) -> None:
    """Flags keep their order; what vLLM does not know stays as it is."""
    assert VllmFlags().translate(theirs.split()) == ours


def notes(theirs: str) -> list[str]:
    flags = VllmFlags()
    flags.translate(theirs.split())
    return flags.notes


@pytest.mark.parametrize(
    ("theirs", "note"),
    [
        ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.9 is --kv-share=0.9 here: "),
        ("--max-num-batched-tokens 512", "--max-num-batched-tokens 512: "),
        ("--enable-chunked-prefill", "--enable-chunked-prefill has no effect here"),
        ("--no_disable_log_stats", "--disable-log-stats has no effect here"),
        ("--rbln-sub-block-size 4", "--rbln-sub-block-size has no effect here"),
        ("-ac.backend FLASH", "--attention-config has no effect here"),
        ("--enforce-eager", "--enforce-eager is --backend=eager here: "),
        ("--load-format hf", "--load-format hf is --load-format=auto here: "),
        ("--max-model-len auto", "--max-model-len auto has no effect here: "),
        ("-cc.cudagraph_mode FULL", '--compilation-config {"cudagraph_mode": "FULL"} has no effect here: '),
    ],
)
def test_a_flag_without_the_same_effect_is_noted(theirs: str, note: str) -> None:
    (line,) = notes(theirs)
    assert line.startswith(note)


def test_flags_with_the_same_meaning_are_not_noted() -> None:
    """Nothing is said of flags that do what they do in vLLM."""
    assert notes("--max-model-len 4096 --dtype bfloat16 --port 1") == []


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        ("--kv-cache-dtype fp8", "--kv-cache-dtype"),
        ("--quantization=fp8", "--quantization"),
        ("-q mxfp4", "-q"),
        ("m --tokenizer n", "--tokenizer"),
        ("--enable-sleep-mode", "--enable-sleep-mode"),
        ("--max-model-len long", "--max-model-len"),
        ("--rope-scaling {}x", "--rope-scaling"),
        ("--task transcription", "--task"),
        ("--kv-events-config.enable_kv_cache_events true", "--kv-events-config"),
        ("--kv_events_config {}", "--kv-events-config"),
        ("--scheduling-policy", "--scheduling-policy expects a value"),
        ("--scheduling-policy random", "--scheduling-policy should be fcfs or priority"),
        ("--lora-target-modules q_proj", "--lora-target-modules"),
        ("--port", "--port expects a value"),
        ("--port --host x", "--port expects a value"),
        ("-cc.lvl 3", "--compilation-config has no key 'lvl"),
        ("-cc.mode FAST", "--compilation-config should have a mode"),
    ],
)
def test_refusals_are_one_line(theirs: str, refused: str) -> None:
    with pytest.raises(ConfigurationRefused, match=rf"^{refused}\b") as caught:
        VllmFlags().translate(theirs.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS.values() if flag.kind == "ignored"], ids=lambda flag: flag.name
)
def test_every_other_flag_of_vllm_has_no_effect(flag: Flag) -> None:
    values = {"switch": [], "value": ["1"], "values": ["1", "2"]}[flag.form]
    for name in (flag.name, flag.name.replace("-", "_").replace("__", "--", 1), *flag.short):
        flags = VllmFlags()
        assert flags.translate(["m", name, *values, "--port", "1"]) == ["m", "--port=1"]
        assert flags.notes == [f"{flag.name if name.startswith('--') else name} has no effect here"]
