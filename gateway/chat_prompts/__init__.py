"""From a conversation to the prompt that the model reads.

`chat_input` has what a chat template writes a prompt of; `encoding` turns it into token ids. `sandbox`
renders templates that clients send, in processes that can be killed; `sandbox_child` is such a process. The
routes import this room; it imports `tools`, `text`, `schemas` and `scheduler_link`.
"""
