"""Files that survive a crash: atomic writes, verified folders, locks, caches and downloads. Imports no other part."""
