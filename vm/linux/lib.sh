# Helpers for scenarios on plain Linux: so far, those of vm/lib are all.
