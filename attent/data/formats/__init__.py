"""One small module per format: bytes in blocks come in, pairs and bad lines go out, and memory stays flat.

`files` opens, decompresses and splits into lines; `safe_xml` parses what `tmx` and `xliff` understand; `tags` picks
the two languages. Which files a person meant by a name is left to `attent.data.corpus`.
"""
