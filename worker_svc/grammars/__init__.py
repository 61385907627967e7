"""Constrained output: grammars compiled by llguidance, matched per slot and applied to logits.

`spec` is a request's constraint, written as a grammar by a `grammar_writer`. A JSON schema is indexed
(`json_documents`), taken apart (`json_schema`) into `json_facts` and written as rules (`json_grammar`);
`notations` writes values as tool calls do, `tags` writes structural tags, `gbnf` reads GBNF, and
`expressions` handles regular expressions. `compiler` caches compiled grammars, whose texts come from
processes of `compile_server`. `constraints` chooses the tokens of a step with a `matcher` per slot. Only this
package imports llguidance. Imported by `execution` and `api`; imports only `devices`, `protos` and `ranks`.
This file imports nothing, because the compiling processes must not load torch.
"""
