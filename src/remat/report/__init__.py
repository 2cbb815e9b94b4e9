"""What people see: figures, tables, progress bars. Nothing here decides anything.

May import planning and what is below it; the only room with matplotlib.
"""
