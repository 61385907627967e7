"""The scheduler's settings: validation and the variables of other stacks."""

from dataclasses import replace

import pytest

from protos.errors import ConfigurationRefused
from protos.service.settings import load
from protos.triptych.v1 import worker_pb2
from scheduler_svc.settings import Settings
from scheduler_svc.workers.descriptions import description_from_proto
from scheduler_svc.workers.replicas import shapes_for

DESCRIPTION = description_from_proto(
    worker_pb2.DescribeResponse(default_max_num_seqs=1, default_chunk=16, default_block_size=16)
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decode-bucket-strategy manual", "manual buckets need a list, for example 1,2,4,8"),
        (
            "--decode-bucket-strategy manual --decode-buckets 1,3 --max-num-seqs 8",
            "must equal the largest batch 8, not 3",
        ),
        ("--max-num-seqs 4 --decode-bucket-min 8", "between 1 and the largest batch 4, not 8"),
        ("--max-num-seqs 4 --decode-bucket-step 1", "must be at least 2 for exponential buckets"),
        (
            "--block-size 96 --max-num-batched-tokens 64",
            "64 .the prefill chunk. and block_size 96 must divide one another",
        ),
        ("--prefill-bucket-strategy manual", "manual prefill buckets need a list"),
        ("--prefill-bucket-step 1", "the prefill bucket step must be at least 2 for exponential buckets"),
        (
            "--prefill-buckets 64,96 --block-size 64",
            "96 .the prefill chunk. and block_size 64 must divide one another",
        ),
        (
            "--prefill-buckets 64,128 --max-num-batched-tokens 256",
            "must equal the largest chunk 256, not 128",
        ),
        (
            "--prefill-buckets 96,512 --block-size 64",
            "prefill bucket 96 and block_size 64 must divide one another",
        ),
        ("--decode-bucket-strategy manual --decode-buckets 0,8", "manual buckets must be at least 1"),
        ("--block-size 0", "--block-size .TRIPTYCH_BLOCK_SIZE. should be greater than or equal to 1"),
        ("--ageing-s 0.00001", "--ageing-s .TRIPTYCH_AGEING_S. must be 0 or at least 0.001"),
        ("--tenant-weights paid=0", "the weight of paid must be above 0"),
        ("--tenant-weights paid", "expected name=weight pairs, for example paid=4,trial=0.5"),
        ("--order random", "'priority-fair' or 'arrival'"),
        ("--decode-steps-per-chunk -1", "greater than or equal to 0"),
        ("--event-interval-ms 5000", "--event-interval-ms .* less than or equal to 1000"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(flags: str, message: str) -> None:
    """The line names the setting, or the two settings that contradict each other."""
    with pytest.raises(ConfigurationRefused, match=message) as caught:
        load(Settings, flags.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("VLLM_RBLN_SUB_BLOCK_CACHE", "0", "sub_block_cache", False),
        ("VLLM_LOG_BATCHSIZE_INTERVAL", "-1", "batchsize_log_interval_s", -1.0),
        ("VLLM_LOG_BATCHSIZE_INTERVAL", "30", "batchsize_log_interval_s", 30.0),
        ("TRIPTYCH_TENANT_WEIGHTS", "paid=4, trial=0.5", "tenant_weights", {"paid": 4.0, "trial": 0.5}),
        ("VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS", "1,2,8", "decode_buckets", (1, 2, 8)),
    ],
)
def test_variables_of_vllm_rbln_are_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str, expected: object
) -> None:
    """Reference variables set the fields that correspond to them."""
    monkeypatch.setenv(variable, value)
    assert getattr(load(Settings, []), field) == expected


@pytest.mark.parametrize(
    ("flags", "buckets"),
    [
        ("", (64, 128, 256, 512)),
        ("--max-num-batched-tokens 128", (64, 128)),
        ("--prefill-buckets 512,32", (32, 512)),
        ("--prefill-bucket-strategy LINEAR --prefill-bucket-step 192", (128, 320, 512)),
        ("--prefill-bucket-min 200", (256, 512)),
        ("--prefill-bucket-limit 1", (512,)),
    ],
)
def test_prefill_buckets_end_at_the_chunk(flags: str, buckets: tuple[int, ...]) -> None:
    """A list is used whatever the strategy is; a worker that does not announce buckets runs one size."""
    settings = load(Settings, flags.split())
    device = replace(DESCRIPTION, default_chunk=512, prefill_buckets=True)
    assert shapes_for(settings, device).chunk_sizes == buckets
    assert shapes_for(settings, replace(device, prefill_buckets=False)).chunk_sizes == buckets[-1:]


@pytest.mark.parametrize(
    ("flags", "max_num_seqs", "buckets"),
    [
        ("--decode-bucket-strategy manual --decode-buckets 1,2,8", 8, (1, 2, 8)),
        ("--decode-bucket-strategy manual --decode-buckets 4,1,8 --max-num-seqs 8", 8, (1, 4, 8)),
        ("--decode-buckets 1,2,8", 32, (2, 4, 8, 16, 32)),
    ],
)
def test_the_largest_manual_bucket_sets_max_num_seqs(
    flags: str, max_num_seqs: int, buckets: tuple[int, ...]
) -> None:
    """The manual list overrides the worker's default; without the manual strategy it has no effect."""
    settings = load(Settings, [*flags.split(), "--decode-bucket-min", "2", "--decode-bucket-limit", "5"])
    shapes = shapes_for(settings, replace(DESCRIPTION, default_max_num_seqs=32))
    assert (shapes.max_num_seqs, shapes.buckets) == (max_num_seqs, buckets)


@pytest.mark.parametrize(
    ("flags", "stages", "max_num_seqs", "buckets"),
    [
        ("--max-num-seqs 32", 2, 32, (2, 4, 8, 16)),
        ("--max-num-seqs 32 --decode-bucket-strategy linear --decode-bucket-step 3", 4, 32, (2, 5, 8)),
        ("--max-num-seqs 10", 4, 10, (2,)),
        ("--decode-bucket-strategy manual --decode-buckets 2,8", 4, 32, (2, 8)),
        ("--decode-bucket-strategy manual --decode-buckets 2,8 --max-num-seqs 17", 2, 17, (2, 8)),
        ("--decode-bucket-min 1", 4, 4, (1,)),
    ],
)
def test_the_largest_bucket_is_the_decode_batch_of_a_pipeline_stage(
    flags: str, stages: int, max_num_seqs: int, buckets: tuple[int, ...]
) -> None:
    """It is max_num_seqs // stages, and max_num_seqs is at least 1 for each stage where nothing sets it."""
    settings = load(Settings, ["--decode-bucket-min", "2", *flags.split()])
    shapes = shapes_for(settings, replace(DESCRIPTION, pipeline_stages=stages))
    assert (shapes.max_num_seqs, shapes.buckets, shapes.stages) == (max_num_seqs, buckets, stages)


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--max-num-seqs 3", "max_num_seqs 3 is smaller than the 4 pipeline stages"),
        ("--decode-bucket-strategy manual --decode-buckets 16 --max-num-seqs 32", "must equal the largest batch 8, not 16"),
        ("--decode-bucket-min 3 --max-num-seqs 8", "between 1 and the largest batch 2, not 3"),
    ],
)  # fmt: skip
def test_decode_buckets_that_no_stage_can_run_are_refused(flags: str, rule: str) -> None:
    """The settings alone cannot tell: the worker says how many stages there are."""
    settings = load(Settings, flags.split())
    with pytest.raises(ConfigurationRefused, match=rule):
        shapes_for(settings, replace(DESCRIPTION, pipeline_stages=4))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--pool-batch-sizes", "1,4", "--pool-prompt-lens", "64"], "2 batch sizes and 1 lengths"),
        (["--pool-batch-sizes", "1"], "1 batch sizes and 0 lengths"),
        (["--pool-prompt-lens", "64"], "0 batch sizes and 1 lengths"),
        (["--pool-batch-sizes", "0", "--pool-prompt-lens", "64"], "must hold numbers from 1, not 0"),
        (["--pool-batch-sizes", "1", "--pool-prompt-lens", "-64"], "must hold numbers from 1, not -64"),
        (["--pool-batch-sizes", "x", "--pool-prompt-lens", "64"], "valid integer"),
    ],
)
def test_invalid_pool_shapes_are_refused(flags: list[str], text: str) -> None:
    """The error names the flag."""
    with pytest.raises(ConfigurationRefused, match="--pool-") as caught:
        load(Settings, flags)
    assert text in caught.value.message


def test_variables_of_vllm_spyre_set_the_pool_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a vLLM-Spyre deployment sets the shapes."""
    monkeypatch.setenv("VLLM_SPYRE_WARMUP_BATCH_SIZES", "1,4")
    monkeypatch.setenv("VLLM_SPYRE_WARMUP_PROMPT_LENS", "4096,1024")
    settings = load(Settings, [])
    assert (settings.pool_batch_sizes, settings.pool_prompt_lens) == ((1, 4), (4096, 1024))
