"""The batchinfer command: one short file per subcommand."""
