"""Statistics of paired, clustered rows. numpy and scipy only: nothing here knows of models, files or metrics."""
