"""Rewrites JSON schemas and regular expressions into forms that xgrammar enforces; refuses the rest.

`json_schema` lowers a schema: `json_scalars` and `json_containers` by type, `formats` for the `format`
keyword, `references` for `$ref`, `one_of` for disjointness. `regex` lowers expressions with `charsets`;
`patterns` replaces expressions in a finished xgrammar grammar. `limits` and `refusals` serve all of them.
Imported by the modules of `grammars`; imports only `protos`.
"""
