"""Files on disk: atomic writes, downloads, caches."""
