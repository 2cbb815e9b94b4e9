"""What people see: figures, tables, progress bars. Nothing here decides anything."""
