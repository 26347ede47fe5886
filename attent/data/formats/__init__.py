"""File formats of parallel text and of documents to pre-translate, one module each; `registry` has the table.

`streams` opens, decompresses and splits into lines, `xml` parses XML safely, `units` has the types of documents that
are written back, and `placeholders` checks that a translation keeps what is not language.
"""
