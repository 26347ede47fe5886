"""The tests. `laws` holds for every model of the family; the other folders mirror the package."""
