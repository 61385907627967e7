"""Constrained output: grammars compiled in separate processes, matched per slot and applied to logits.

`spec` is a request's constraint, lowered for one of two `engines`: llguidance, and xgrammar for GBNF. A JSON
schema is indexed (`json_documents`), taken apart (`json_schema`) into `json_facts` and written as rules
(`json_grammar`, `json_numbers`, `formats`); `tags` writes structural tags, and `expressions` with `charsets`
handles regular expressions. `special_tokens` gives an xgrammar tag's special tokens a text. `compiler`
caches compiled grammars; `compile_client` gets them from processes of `compile_server`. `constraints`
chooses the tokens of a step with a `matcher` per slot and the `masks`; `rank_constraints` stands between
in a replica of several ranks. Only this package imports the engines. Imported by `execution` and `api`;
imports only `devices`, `protos` and `ranks.channels`. This file imports nothing, because the compiling
processes must not load torch.
"""
