"""The gateway: OpenAI's HTTP interface over the scheduler's gRPC.

It turns text into token ids and back, and needs neither torch nor model weights. Layers, from the top:
``__main__``; ``app``; ``routes``; ``answers``; ``tools``; ``parsers`` and ``scheduler_client``; ``text``,
``http`` and ``settings``; ``schemas``, ``metrics`` and ``version``; ``format_names`` and ``quoting``. A layer
imports only layers below it.
"""
