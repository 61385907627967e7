"""The gateway: an HTTP server with OpenAI's interface that turns text into token ids for the scheduler, and back.

It needs neither torch nor model weights. Layers, from the top: ``__main__`` · ``app`` · ``routes`` · ``answers`` · ``tools`` ·
``parsers`` · ``scheduler_link`` · ``text`` and ``schemas`` · ``http`` · ``metrics``, ``settings`` and ``version`` · ``format_names``
and ``quoting``. A layer imports only layers below it.
"""
