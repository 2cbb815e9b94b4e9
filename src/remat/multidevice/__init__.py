"""Planning for several devices: where ops run, what is copied, kept or run again."""
