"""Text and token ids of one model.

``tokenization`` loads tokenizer files, encodes and decodes; ``detokenizer`` decodes token by token;
``chat_template`` renders conversations; ``template_probe`` finds out what a template shows about answers, and
``content_form`` in which form it shows the content of messages;
``stop_strings`` ends streamed text. Every room above imports this one; it imports only the format names and
``quoting``.
"""
