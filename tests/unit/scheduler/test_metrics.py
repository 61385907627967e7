"""The scheduler's metrics as Prometheus reads them."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protos.errors import Overloaded
from protos.service.backpressure import UnreadLimits
from protos.steps import Decode
from protos.triptych.v1 import worker_pb2
from protos.triptych.v1.worker_pb2 import WorkerReport
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.metrics import RETIRED, SchedulerMetrics
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.settings import Settings
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.descriptions import description_from_proto
from scheduler_svc.workers.model_files import describe_served
from tests.support.scheduler.factories import Rig, make_rig, make_shapes, make_submission

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape:
    """Samples by name and labels, without the model label."""

    def __init__(self, text: bytes) -> None:
        families = list(text_string_to_metric_families(text.decode()))
        self.names = [family.name for family in families]
        self.samples: Samples = {}
        for family in families:
            for sample in family.samples:
                labels = frozenset(
                    pair for pair in sample.labels.items() if pair != ("model_name", "the model")
                )
                assert (sample.name, labels) not in self.samples
                self.samples[sample.name, labels] = sample.value

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)


class MeasuredRig:
    """A rig within a deployment."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.deployment = Deployment(Settings(), rig.engine)
        model = description_from_proto(worker_pb2.DescribeResponse()).model
        self.deployment.served = describe_served(model, {}, served_names=["the model"], max_model_len=64)
        self.metrics = SchedulerMetrics(
            self.deployment, UnreadLimits(per_reader=1000, total=1000, flags=("", ""))
        )

    def generated(self) -> float:
        """Returns the new tokens of all engines, without writing and reading all of the text."""
        families = {family.name: family for family in self.metrics.collect()}
        return sum(sample.value for sample in families["vllm:generation_tokens"].samples)

    def scrape(self) -> Scrape:
        return Scrape(generate_latest(self.metrics))


def test_work_is_counted_once_under_its_replica() -> None:
    """For two requests that share two chunks, tokens, padding, hits and phases add up."""
    rig = make_rig(make_shapes(buckets=(1, 4)))
    bench = MeasuredRig(rig)
    rig.submit(make_submission(list(range(3, 13)), request_id="a", max_tokens=4))
    rig.now = 2.0
    rig.step()
    rig.now = 5.0
    rig.run()
    rig.submit(make_submission(list(range(3, 13)), request_id="b", max_tokens=1))
    rig.run()
    scrape, engine = bench.scrape(), {"engine": "replica-0"}
    assert scrape.value("vllm:prefix_cache_queries_total", **engine) == 20
    assert scrape.value("vllm:prefix_cache_hits_total", **engine) == 8
    for bucket, steps, tokens in (("1", 0, 0), ("2", 2, 4), ("4", 2, 8)):
        assert scrape.value("triptych:prefill_chunks_total", bucket=bucket, **engine) == steps
        assert scrape.value("triptych:prefill_tokens_total", bucket=bucket, **engine) == tokens
    assert scrape.total("triptych:prefill_padding_tokens_total") == 0
    assert scrape.value("vllm:generation_tokens_total", **engine) == 5
    for bucket, steps in (("1", 3), ("4", 0)):
        assert scrape.value("triptych:decode_steps_total", bucket=bucket, **engine) == steps
        assert scrape.value("triptych:decode_rows_total", bucket=bucket, **engine) == steps
        assert scrape.value("triptych:decode_padding_rows_total", bucket=bucket, **engine) == 0
    assert scrape.value("vllm:request_queue_time_seconds_count", **engine) == 2
    assert scrape.value("vllm:request_prefill_time_seconds_sum", **engine) == 5
    assert scrape.value("vllm:request_prefill_time_seconds_bucket", le="2.5", **engine) == 1
    assert scrape.value("vllm:request_prefill_time_seconds_bucket", le="5.0", **engine) == 2
    assert scrape.value("vllm:request_decode_time_seconds_count", **engine) == 2
    assert scrape.value("vllm:request_inference_time_seconds_count", **engine) == 2
    # Chunks of 4, 4, 2 and 2 tokens, and three decode steps of one row.
    assert scrape.value("vllm:iteration_tokens_total_count", **engine) == 7
    assert scrape.value("vllm:iteration_tokens_total_sum", **engine) == 15
    assert scrape.value("vllm:prompt_tokens_total", **engine) == 20
    assert scrape.value("vllm:prompt_tokens_cached_total", **engine) == 8
    assert scrape.value("vllm:prompt_tokens_by_source_total", source="local_compute", **engine) == 12
    assert scrape.value("vllm:request_prefill_kv_computed_tokens_sum", **engine) == 12
    assert scrape.value("vllm:request_num_preemptions_bucket", le="1.0", **engine) == 2
    # Bounds of tokens end at the longest sequence.
    assert scrape.value("vllm:request_prefill_kv_computed_tokens_bucket", le="50.0", **engine) == 2
    assert ("vllm:request_prefill_kv_computed_tokens_bucket", "100.0") not in {
        (name, dict(labels).get("le")) for name, labels in scrape.samples
    }


def test_load_and_memory_are_gauges() -> None:
    """Running and waiting requests and used blocks are reported for three requests on two slots."""
    rig = make_rig(make_shapes(max_num_seqs=2, buckets=(1, 2)))
    bench = MeasuredRig(rig)
    for name in ("a", "b", "c"):
        first = ord(name)
        rig.submit(make_submission([first % 90 + 3] * 9, request_id=name, max_tokens=20))
    for _ in range(6):
        rig.step()
    scrape, engine = bench.scrape(), {"engine": "replica-0"}
    assert scrape.value("vllm:num_requests_running", **engine) == 2
    assert scrape.value("vllm:num_requests_waiting", engine="") == 1
    assert scrape.value("vllm:num_requests_waiting_by_reason", engine="", reason="capacity") == 1
    assert scrape.value("vllm:num_requests_waiting_by_reason", engine="", reason="deferred") == 0
    assert scrape.value("triptych:waiting_tokens") == 9
    used = scrape.value("triptych:kv_blocks", group="0", state="used", **engine)
    assert used + scrape.value("triptych:kv_blocks", group="0", state="free", **engine) == 64
    assert scrape.value("vllm:kv_cache_usage_perc", **engine) == pytest.approx(used / 64)
    assert scrape.value("triptych:cached_prefixes", group="0", **engine) == 3
    assert scrape.value("triptych:replicas", state="ready") == 1
    cache = {"block_size": "4", "num_gpu_blocks": "64", "enable_prefix_caching": "True", "cache_dtype": ""}
    assert scrape.value("vllm:cache_config_info", **cache, **engine) == 1


def test_adapters_are_named_as_vllm_names_them() -> None:
    """One gauge lists the adapters with running and with waiting requests; counters have loads and copies."""
    rig = make_rig(adapter_slots=1, max_cpu_loras=1)
    bench = MeasuredRig(rig)
    for name in ("a", "b"):
        rig.load_adapter(name)
    for name in ("b", "a"):
        rig.submit(make_submission(request_id=name, lora_name=name, max_tokens=4))
        rig.step()
    info = {"max_lora": "1", "running_lora_adapters": "b", "waiting_lora_adapters": "a"}
    assert "vllm:lora_requests_info" not in MeasuredRig(make_rig()).scrape().names
    running = bench.scrape()
    assert running.total("vllm:lora_requests_info") > 0
    assert [dict(labels) for name, labels in running.samples if name == "vllm:lora_requests_info"] == [info]
    rig.run()
    rig.scheduler.stats.report.adapter_placements = 2
    scrape, engine = bench.scrape(), {"engine": "replica-0"}
    assert scrape.value("triptych:lora_placements_total", **engine) == 2
    assert scrape.value("triptych:lora_loads_total", **engine) == 3
    assert scrape.value("triptych:lora_evictions_total", **engine) == 2


def test_preemptions_have_a_reason() -> None:
    """The preemptions by reason add up to the total."""
    rig = make_rig(num_blocks=9)
    bench = MeasuredRig(rig)
    for name in "ab":
        rig.submit(make_submission([3, 4, 5, 6], request_id=name, max_tokens=20))
    rig.run()
    scrape = bench.scrape()
    assert scrape.value("triptych:preemptions_total", engine="replica-0", reason="memory") >= 1
    assert scrape.total("triptych:preemptions_total") == scrape.total("vllm:num_preemptions_total")


def test_workers_report_what_only_they_know() -> None:
    """Times of steps by kind and bucket, plans ahead, late graphs, memory and times of grammars are shown."""
    rig = make_rig(make_shapes(buckets=(1, 4)))
    bench = MeasuredRig(rig)
    rig.submit(make_submission([3, 4, 5, 6], request_id="a", max_tokens=3))
    report = WorkerReport(late_graphs=2, grammar_us=500_000, free_memory_bytes=7, process_memory_bytes=9)
    while (plan := rig.scheduler.next_plan()) is not None:
        result = rig.device.run(plan)
        is_decode = isinstance(plan.work, Decode)
        rig.scheduler.update(replace(result, execute_us=4000 if is_decode else 40_000, report=report))
    rig.scheduler.stats.grammar_compile_s.observe(0.25)
    bench.deployment.phase_seconds["replica-0"] = {"compile": 1.5}
    scrape, engine = bench.scrape(), {"engine": "replica-0"}
    assert scrape.value("triptych:step_seconds_sum", kind="prefill", bucket="4", **engine) == 0.04
    assert scrape.value("triptych:step_seconds_bucket", kind="decode", bucket="1", le="0.005", **engine) == 2
    assert scrape.value("triptych:plans_total", **engine) == 3
    assert scrape.value("triptych:plans_ahead_total", **engine) == 0
    assert scrape.value("triptych:late_graphs_total", **engine) == 2
    assert scrape.value("triptych:grammar_seconds_total", **engine) == 0.5
    assert scrape.value("triptych:grammar_compile_seconds_sum", **engine) == 0.25
    assert scrape.value("triptych:worker_memory_bytes", kind="device_free", **engine) == 7
    assert scrape.value("triptych:worker_memory_bytes", kind="process", **engine) == 9
    assert scrape.value("triptych:configuration_seconds", phase="compile", **engine) == 1.5
    rig.scheduler.stats.report.ClearField("free_memory_bytes")  # the device cannot tell
    assert bench.scrape().total("triptych:worker_memory_bytes") == 9


def test_requests_that_the_queue_refuses_are_counted_by_limit() -> None:
    """The counter has vLLM's names for both limits."""
    rig = make_rig(make_shapes(max_num_seqs=1, buckets=(1,)), max_waiting=1, max_waiting_tokens=20)
    bench = MeasuredRig(rig)
    for name in "ab":
        rig.submit(make_submission(request_id=name))
    for prompt, name in ((4, "c"), (20, "d")):
        with pytest.raises(Overloaded):
            rig.submit(make_submission([3] * prompt, request_id=name))
    scrape = bench.scrape()
    assert scrape.value("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
    assert scrape.value("vllm:admission_rejections_total", reason="max_num_queued_tokens") == 0


def test_decode_batch_sizes_are_a_histogram() -> None:
    """Rows before padding are counted in powers of two."""
    bench = MeasuredRig(make_rig())
    for rows in (1, 3, 3, 4096):
        bench.deployment.histogram.observe(rows)
    scrape = bench.scrape()
    assert scrape.value("triptych:batch_size_bucket", le="2.0") == 1
    assert scrape.value("triptych:batch_size_bucket", le="4.0") == 3
    assert scrape.value("triptych:batch_size_bucket", le="4096.0") == 4
    assert scrape.value("triptych:batch_size_sum") == 4103


async def test_counters_outlive_their_replica_and_continue_when_it_returns() -> None:
    """No counter falls when a replica leaves; its gauges disappear."""
    rig = make_rig()
    bench = MeasuredRig(rig)
    rig.submit(make_submission(request_id="a"))
    rig.run()
    before = bench.scrape()
    bench.deployment.detach("replica-0", Loss.DIED)
    away = bench.scrape()
    counters = [key for key in before.samples if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert len(counters) > 30
    lost = ("triptych:lost_workers_total", frozenset({("reason", "died")}))
    assert [key for key in counters if away.samples[key] != before.samples[key]] == [lost]
    assert not any(name == "vllm:num_requests_running" for name, _ in away.samples)
    rig.start()
    rig.submit(make_submission(request_id="b"))
    rig.run()
    back = bench.scrape()
    assert back.value("vllm:generation_tokens_total", engine="replica-0") == 2 * before.total(
        "vllm:generation_tokens_total"
    )
    assert all(back.samples[key] >= before.samples[key] for key in counters)
    bench.deployment.detach("replica-0", Loss.DIED)


async def test_old_lost_replicas_share_one_series() -> None:
    """The last lost replicas keep their counters, older ones are summed, and the total never falls."""
    rig = make_rig()
    bench = MeasuredRig(rig)
    bench.deployment.detach("replica-0", Loss.DIED)
    for index in range(20):
        rig.start()
        replica = rig.engine.replicas.pop("replica-0")
        rig.engine.attach(f"w{index}", AttachedReplica(replica.scheduler, lambda: None))
        rig.submit(make_submission(request_id=str(index)))
        rig.run()
        bench.deployment.detach(f"w{index}", Loss.DIED)
        assert bench.generated() == 8 * (index + 1)
    scrape = bench.scrape()
    engines = {dict(labels)["engine"] for _, labels in scrape.samples if dict(labels).get("engine")}
    assert engines == {RETIRED, *(f"w{index}" for index in range(4, 20))}
    assert scrape.value("vllm:generation_tokens_total", engine=RETIRED) == 8 * 4


def test_before_a_model_is_served_only_workers_are_reported() -> None:
    """No metric with a model label appears."""
    bench = MeasuredRig(make_rig())
    bench.deployment.served = None
    bench.deployment.starting["w"] = "weights"
    assert bench.scrape().names == [
        "triptych:replicas",
        "triptych:lost_workers",
        "triptych:stalled_replicas",
        "triptych:suspect_requests",
        "triptych:poison_requests",
        "triptych:unserved_requests",
        "triptych:timed_out_requests",
        "triptych:unread_tokens",
        "triptych:slow_readers",
        "triptych:scheduler_certificate_days_left",
    ]
    assert bench.scrape().value("triptych:replicas", state="configuring") == 1


def test_replica_names_are_escaped() -> None:
    """Workers choose their names, so any text must survive the format."""
    rig = make_rig()
    bench = MeasuredRig(rig)
    name = 'a"} 1\nevil{x="\\'
    rig.engine.replicas[name] = rig.engine.replicas.pop("replica-0")
    assert bench.scrape().value("vllm:num_requests_running", engine=name) == 0
