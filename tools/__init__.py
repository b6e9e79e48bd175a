"""Scripts that write pages, tables and figures of the documentation."""
