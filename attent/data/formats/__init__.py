"""File formats of parallel text and of documents to pre-translate, one module each; `registry` has the table.

`placeholders`, `directives` and `accelerators` keep in a translation what is not language.
"""
