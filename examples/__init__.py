"""Programs that show remat at work on models a reader can run at home."""
