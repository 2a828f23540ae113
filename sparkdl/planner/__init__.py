"""Plans of a fit: the ways to run it, predicted from a few measurements, ranked, with reasons.

It measures by commands that ranks of a gang run, and by trial fits that are handed to it. It knows
neither ``Trainer`` nor an engine.
"""
