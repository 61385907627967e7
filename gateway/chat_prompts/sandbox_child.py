"""The process that renders clients' templates: jobs on standard input, answers on standard output.

Eight bytes with its length precede the JSON of each. Arguments: CPU seconds of a job, bytes of memory,
characters of a prompt.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import jinja2
import jinja2.debug  # errors import it, when no file can be opened any more

from gateway.chat_prompts.chat_input import ChatInput
from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument


def answer(job: dict[str, Any], max_text: int) -> dict[str, Any]:
    """Returns the prompt of one job, or the error that the client gets."""
    try:
        template = ChatTemplate(job["source"], job["special_tokens"])
        text, ignored = ChatInput(**job["chat"]).write(template)
        if len(text) > max_text:
            return {"error": f"chat_template writes {len(text)} characters; the limit is {max_text}"}
    except InvalidArgument as error:
        return {"error": error.message, "param": error.param}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"chat_template cannot be compiled: {error}"}
    except Exception as error:  # noqa: BLE001 - whatever it is, the template has caused it
        return {"error": f"chat_template failed: {type(error).__name__}: {str(error)[:200]}"}
    return {"text": text, "ignored": ignored}


def main() -> None:
    """Answers jobs until standard input ends."""
    cpu_s, memory_bytes, max_text = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_bytes,) * 2)
    # From here on it opens and writes no file.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while len(header := stdin.read(8)) == 8:
        job = json.loads(stdin.read(int.from_bytes(header)))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process by default
        result = answer(job, max_text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        payload = json.dumps(result).encode()
        stdout.write(len(payload).to_bytes(8) + payload)
        stdout.flush()


if __name__ == "__main__":
    main()
