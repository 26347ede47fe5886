"""File formats of parallel text and of documents to pre-translate, one module each; `registry` has the table.

`streams` opens, decompresses and splits into lines, `xml` parses XML safely, `units` has the types of documents that
are written back. `placeholders`, `directives` and `accelerators` keep in a translation what is not language, and
`unsupported` names formats that are refused.
"""
