"""What people look at: text tables, charts, README tables and the report page, made from a run."""
