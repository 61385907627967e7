"""The gateway: OpenAI's HTTP interface over the scheduler's gRPC.

It turns text into token ids and back, and needs neither torch nor model weights. Layers, from the top:
``__main__`` · ``app`` · ``routes`` · ``answers`` · ``tools`` · ``parsers`` · ``scheduler_link`` · ``text``
and ``schemas`` · ``http`` · ``metrics``, ``settings`` and ``version`` · ``format_names`` and ``quoting``. A
layer imports only layers below it.
"""
