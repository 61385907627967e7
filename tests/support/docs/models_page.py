"""docs/models.md, from the table of the tests' small models and the findings in chat templates."""

import json
from collections import defaultdict

from tests.support.docs.pages import NOTICE, page, table
from tests.support.parsers.chat_templates import FOUND
from tests.support.zoo import families
from tests.support.zoo.table import REFUSALS, ROWS
from worker_svc.vllm_adapter.configuration import TEXT_MODELS

_BEFORE = """# Models

The worker builds a model from vLLM's class for its architecture (`architectures` in its config.json) and runs it on
its own kernels. A small random model of every architecture below gives transformers' greedy tokens in float32, and its
log-probabilities within 0.001: prompts in chunks, decode steps in every bucket with other requests' memory in the
padding, eagerly and in graphs. Other architectures that vLLM knows may work as well; nothing here tests them.

## What is served

Every row runs on CPUs. The column GPU was measured on one H200 (2026-11-23) at `-O 1` and `-O 2`, in CUDA graphs
(`tests/e2e/zoo/test_gpu.py`); Qwen2.5-VL and Qwen3-VL ran there at `-O 1` only, and Llama 3's scaled rotary positions
have not run there. DeepSeek's graphs failed the comparison with the model's own forward, so a worker logs that and runs
without them. The column NPU is true for graphs that pass the rules of `rbln-check`; no real NPU has run them. Most of
these tests are slow ones: `make test-slow` runs them.
"""

_NOTES = """## Notes

- **Latent attention (DeepSeek).** On CPUs and GPUs the paged cache holds one latent vector and one rotated key a token,
  instead of keys and values of all heads, and a plain PyTorch kernel reads it. Prefix sharing works as with other
  models. NPU kernels take keys and values, so an NPU expands them and needs more KV memory. Quantized weights are
  refused with latent attention, and so is sparse attention (DeepSeek-V3.2).
- **gpt-oss.** Checkpoints in MXFP4 are dequantized while they are read, and take the memory of bfloat16: about 42 GB for
  gpt-oss-20b. `tests/e2e/worker/test_checkpoint_cases.py` compares them with transformers. MXFP4 of other architectures
  is refused.
- **Llama 4** attends within chunks of 8,192 tokens in most layers. A context of one chunk is served, where this is full
  attention; `--max-model-len` above it is refused.
- **Phi-3 with long contexts** uses the long rotary factors if `--max-model-len` lets it, as vLLM does: the model's own
  limit decides, not the length of one request.
- **ALiBi** on GPUs runs in plain PyTorch, not in the Triton kernels.

## Multimodal checkpoints

`--language-model-only`, or `VLLM_RBLN_DISABLE_MM=1`, serves the text model inside a multimodal checkpoint. The other
weights are neither read nor held in memory. Without it such a checkpoint is refused in one line that names the flag.
Chat messages with an image are refused with status 400, which names the part's type.
"""

_REFUSED = """## What is refused

Each of these is refused in one line, before anything is built. So is every architecture whose layers keep a state other
than keys and values, every encoder-decoder model, and every multimodal model that is not in the table above.
"""

_TEMPLATES = """## Tool calls and thinking

`--tool-call-parser auto` and `--reasoning-parser auto`, the defaults, render the chat template with probes and compare.
The table has the findings for the templates that `trl` and llama.cpp ship. A name is an entry of the gateway's table;
text is an example in a format derived from the template. `python -m tests.support.parsers.chat_templates` finds them
anew, and `tests/unit/gateway/text/test_derive.py` reads calls that trl's templates write.
"""


def models() -> str:
    """Returns the page."""
    served = table(
        ("architecture", "models", "what is special", "GPU", "NPU", "tested with", "shown by"),
        [
            (
                f"`{row.architecture}`",
                row.models,
                row.special,
                row.gpu,
                row.npu,
                ", ".join(row.features),
                "<br>".join(f"`{path}`" for path in row.shown_by),
            )
            for row in ROWS
        ],
    )
    refused = table(
        ("architecture", "the line says"),
        [(f"`{name}`", reason) for name, (_, reason) in families.REFUSED.items()],
    )
    texts = table(
        ("architecture", "served as"), [(f"`{name}`", f"`{text}`") for name, text in TEXT_MODELS.items()]
    )
    shown = table(("tool calls", "thinking", "chat templates"), _shown())
    return page(
        [NOTICE, "", _BEFORE],
        served,
        [_NOTES],
        texts,
        [_TEMPLATES],
        shown,
        [_REFUSED],
        refused,
        [f"`{REFUSALS}` shows the refusals."],
    )


def _shown() -> list[tuple[str, str, str]]:
    """Returns the rows of formats with their templates; those for training usually differ in marks alone."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source, templates in json.loads(FOUND.read_text()).items():
        for name, found in templates.items():
            if found == templates.get(name.removesuffix("_training")) and name.endswith("_training"):
                continue
            tools = f"`{found['tools']}`" if "tools" in found else f"none: {_words(found['reason'])}"
            thinking = f"`{found['thinking']}`" if "thinking" in found else ""
            rows[tools, thinking][source].append(name)
    return [
        (*formats, "<br>".join(f"{source}: {', '.join(names)}" for source, names in sources.items()))
        for formats, sources in sorted(rows.items(), key=lambda row: (row[0][0].startswith("none"), row[0]))
    ]


def _words(reason: str) -> str:
    start, colon, text = reason.partition(": ")
    return f"{start}: `{text}`" if colon else reason
