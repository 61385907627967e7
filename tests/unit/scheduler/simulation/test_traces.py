"""Trace formats, each by lines of the published files."""

from pathlib import Path

import pytest

from protos.errors import ConfigurationRefused
from scheduler_svc.simulation.requests import PromptMaker, SimulatedRequest
from scheduler_svc.simulation.traces import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:10.003948+00:00,2162,5
2024-05-12 00:00:00.000000+00:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURST_GPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log
"""
MOONCAKE = """{"timestamp": 12000, "input_length": 898, "output_length": 324, "hash_ids": [0, 1099]}
{"timestamp": 15000, "input_length": 934, "output_length": 421, "hash_ids": [0, 1426]}
"""
OURS = """{"arrival_s": 2.5, "prompt_tokens": 2100, "output_tokens": 200, "prefix": [["system", 2000]], "tenant": "a", "priority": 1}

{"arrival_s": 1.5, "prompt_token_ids": [3, 4, 5], "output_tokens": 2}
"""


def read(folder: Path, text: str) -> list[SimulatedRequest]:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (AZURE, [(0.0, 374, 44), (4.315, 396, 109)]),
        (AZURE_2024, [(0.0, 2399, 6), (10.004, 2162, 5)]),
        (BURST_GPT, [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]),
        (BURST_GPT_3, [(0.0, 906, 446), (51.0, 36, 29)]),
        (MOONCAKE, [(0.0, 898, 324), (3.0, 934, 421)]),
        (OURS, [(0.0, 3, 2), (1.0, 2100, 200)]),
    ],
    ids=["Azure", "Azure 2024", "BurstGPT", "BurstGPT 3", "Mooncake", "ours"],
)
def test_each_format_has_times_and_counts(
    tmp_path: Path, text: str, requests: list[tuple[float, int, int]]
) -> None:
    read_back = read(tmp_path, text)
    assert [(round(one.arrival_s, 3), one.prompt_tokens, one.output_tokens) for one in read_back] == requests


def test_tenants_priorities_and_token_ids_are_read(tmp_path: Path) -> None:
    plain, shared = read(tmp_path, OURS)
    assert plain.prompt_token_ids == (3, 4, 5)
    assert (shared.tenant, shared.priority, shared.prefix) == ("a", 1, (("system", 2000),))
    assert [one.tenant for one in read(tmp_path, BURST_GPT)] == ["ChatGPT", "ChatGPT", "GPT-4"]


def test_prompts_share_what_their_hash_ids_share(tmp_path: Path) -> None:
    maker = PromptMaker()
    first, second = (maker.prompt(request) for request in read(tmp_path, MOONCAKE))
    assert (len(first), len(second)) == (898, 934)
    assert first[:512] == second[:512]
    assert first[512] != second[512]


def test_a_row_without_its_last_column_has_no_tenant(tmp_path: Path) -> None:
    (request,) = read(tmp_path, "Timestamp,Request tokens,Response tokens,Model\n5,10,20\n")
    assert request.tenant == ""


def test_the_first_requests_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(OURS)
    (request,) = read_trace(path, 1)
    assert (request.prompt_tokens, request.arrival_s) == (2100, 0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no requests"),
        ("hello\n", "neither JSON lines nor a CSV file with known columns"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}\n{"arrival_s"\n', "line 2: Invalid JSON"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "line 1: prompt_tokens: Input should be greater"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "tennant": "a"}', "line 1: tennant: Extra"),
        ('{"arrival_s": 0, "output_tokens": 1}', "prompt_tokens or prompt_token_ids is missing"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix": [["a", 6]]}', "more than the 5"),
        ('{"arrival_s": 0, "prompt_tokens": 99999999, "output_tokens": 1}', "line 1: prompt_tokens: Input should be less"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 1}', "line 1: timestamp: Input should be a finite"),
        (BURST_GPT + "\n\n-1,GPT-4,1,1,2,log\n", "line 7: Timestamp: must be a number of seconds from 0, not '-1'"),
        (BURST_GPT + "nan,GPT-4,1,1,2,log\n", "line 5: Timestamp: must be"),
        (BURST_GPT + "5\n", "line 5: Request tokens: must be a whole"),
        (BURST_GPT + "5,GPT-4,99999999,1\n", "line 5: Request tokens: must be a whole number up to 16777216"),
        (BURST_GPT + f"5,{'a' * 200_000},1,1\n", "not a CSV file: field larger"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,2\n", "ContextTokens: must be a whole"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_in_a_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        read(tmp_path, text)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
