"""Text and token ids of a model.

``tokenization`` loads tokenizer files, encodes and decodes; ``detokenizer`` decodes token by token and
finds stop strings; ``chat_template`` renders conversations and examines templates. The rooms above import
this room; it imports ``schemas`` and the names of formats.
"""
