"""Text and token ids of a model.

``tokenization`` loads tokenizer files, encodes and decodes; ``detokenizer`` decodes token by token;
``chat_template`` renders conversations and examines templates, and ``stop_strings`` ends streamed text. The
rooms above import this room; it imports only the format names and ``quoting``.
"""
