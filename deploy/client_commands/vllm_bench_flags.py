"""The flags of `vllm bench serve` that have no effect in `triptych bench`, or that it refuses."""

from typing import Final

_COUNTS: Final = "the server counts tokens"
_OTHER_WORKLOADS: Final = "it belongs to a workload that is not served"
MOOT: Final = {
    "--tokenizer": _COUNTS,
    "--tokenizer-mode": _COUNTS,
    "--request-id-prefix": "the server chooses ids",
    "--timeline-itl-thresholds": "no timeline is drawn",
    **dict.fromkeys(
        (
            "--custom-output-len",
            "--spec-bench-output-len",
            "--spec-bench-category",
            "--timed-trace-chunk-hash-size",
            "--timed-trace-sec-multiplier",
            "--timed-trace-label-timestamp",
            "--timed-trace-label-input-length",
            "--timed-trace-label-output-length",
            "--timed-trace-label-hash-ids",
            "--blazedit-min-distance",
            "--blazedit-max-distance",
            "--asr-max-audio-len-sec",
            "--asr-min-audio-len-sec",
            "--random-mm-base-items-per-request",
            "--random-mm-num-mm-items-range-ratio",
            "--random-mm-limit-mm-per-prompt",
            "--random-mm-bucket-config",
            "--hf-subset",
            "--hf-split",
            "--hf-name",
            "--hf-output-len",
            "--bfcl-categories",
            "--speed-bench-dataset-subset",
            "--speed-bench-output-len",
            "--speed-bench-category",
        ),
        _OTHER_WORKLOADS,
    ),
}
"""Flags with a value that have no effect, each with its reason."""
MOOT_SWITCHES: Final = {
    "--trust-remote-code": _COUNTS,
    "--skip-tokenizer-init": _COUNTS,
    "--disable-tqdm": "there is no progress bar",
    "--enable-multimodal-chat": "prompts are text",
    "--no-stream": _OTHER_WORKLOADS,
    "--skip-chat-template": _OTHER_WORKLOADS,
    "--custom-ensure-client-side-data": _OTHER_WORKLOADS,
    "--no-reranker": _OTHER_WORKLOADS,
}
"""The same for flags without a value."""
REFUSED: Final = {
    "--insecure": "use --ca-file",
    "--header": "set OPENAI_API_KEY for the key",
    "--lora-modules": "name an adapter with --model",
    "--lora-assignment": "name an adapter with --model",
    "--ramp-up-strategy": "run once for each --request-rate",
    "--ramp-up-start-rps": "run once for each --request-rate",
    "--ramp-up-end-rps": "run once for each --request-rate",
    "--probe-request-rate": "run a second `triptych bench` beside this one",
    "--self-timed": "use --request-rate",
    "--no-self-timed": "use --request-rate",
    "--disable-shuffle": "use --seed to repeat an order",
    "--no-oversample": "lower --num-prompts to what the file has",
    "--random-batch-size": "requests have one prompt each; omit it",
    "--save-detailed": "the JSON has the figures of all requests together; omit it",
    "--append-result": "name another file with --result-filename",
    "--use-beam-search": "beams are not streamed; omit it",
    "--profile": "profile with the device's own tools",
    "--plot-timeline": "omit it",
    "--plot-dataset-stats": "omit it",
}
"""Flags that are refused, each with what to do instead."""
