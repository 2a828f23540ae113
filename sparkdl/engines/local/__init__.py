"""The engine that runs iterations in this process."""
