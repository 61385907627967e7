"""`--help=WORD` of `triptych serve` and of the services."""

import pytest

from deploy import cli


def printed(capsys: pytest.CaptureFixture[str], command: str, word: str) -> str:
    """Returns what the command prints before it ends with 0."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, f"--help={word}", "--port", "1"])
    assert not stopped.value.code
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


@pytest.mark.parametrize("command", ["serve", "up", "worker"])
def test_the_headings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`listgroup` prints them alone."""
    lines = printed(capsys, command, "listgroup").splitlines()
    assert {"Model", "KV memory", "Compilation"} <= set(lines)
    assert not any("--" in line for line in lines)


@pytest.mark.parametrize(
    ("word", "expected", "absent"),
    [
        ("max-num-seqs", "--max-num-seqs int", "--max-model-len"),
        ("--max_num_seqs", "--max-num-seqs int", "--max-model-len"),
        ("max", "--max-log-mb int", "--port"),
        ("ModelConfig", "Model:", "--max-log-mb"),
        *((word, "KV memory:\n  --kv", "--port") for word in ("KV memory", "kv-memory", "KV_Memory")),
        ("gpu-memory", "--gpu-memory-utilization is --kv-share here: it has another base", "--port"),
        ("chunked", "--enable-chunked-prefill has no effect here", "--port"),
        ("kv-cache-dtype", "--kv-cache-dtype is not supported: KV caches have", "--port"),
        ("nothing", "no heading and no flag matches 'nothing'; --help=listgroup lists the headings", ":\n"),
        ("all", "usage: triptych serve [MODEL] [FLAGS]", "kv-cache-dtype"),
    ],
)
def test_what_a_word_names(word: str, expected: str, absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of ours under their headings, and those of `vllm serve` with what they are here."""
    text = printed(capsys, "serve", word)
    assert expected in text
    assert absent not in text


@pytest.mark.parametrize("command", ["serve", "up"])
def test_help_is_one_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert (
        len(flags) == len({*flags, "--model", "--port", "--max-model-len", "--enable-lora", "--secure"}) == 22
    )
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert "--help-all shows all flags" in " ".join(lines)


@pytest.mark.parametrize("command", ["serve", "gateway", "scheduler", "worker"])
def test_help_all_has_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage" in (everything := printed(capsys, command, "all"))
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    assert capsys.readouterr().out == everything
    assert "--max-concurrent-rpcs" in everything or command == "gateway"
