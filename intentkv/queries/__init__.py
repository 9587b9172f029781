"""Query sources: which queries to capture. One file each."""
