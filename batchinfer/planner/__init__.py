"""The plan of a window of rows: prefix tree, execution order, cost."""
